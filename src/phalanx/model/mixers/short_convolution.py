"""Gated short convolution (LFM2, arXiv 2511.23404).

Shapes: B batch, T tokens, D width, C channels of this rank, S taps."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from phalanx.model.dtypes import at_least_fp32
from phalanx.model.mixers.convolution import causal_convolution, causal_convolution_backward
from phalanx.model.part import PartModule
from phalanx.model.products import ProductLinear, TensorTuple
from phalanx.model.sequence_context import SequenceContext
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.operations import Part


class ShortConvolution(PartModule):
    """Product of output_gate x and the convolution of input_gate x times values x, over tokens of the same document."""

    taps: nn.Parameter
    bias: nn.Parameter | None
    out: ProductLinear

    def __init__(self, layer: ModelSpec, part: Part) -> None:
        """Create the mixer of a layer (`spec.layers`) from its declaration."""
        super().__init__(part)
        if "bias" not in part.parameters:
            self.bias = None
        self.core = convolve_gated

    def sequence_inputs(self, context: SequenceContext) -> tuple[Tensor | None]:
        """Return the starts of documents, [B, T]."""
        return (context.document_starts,)

    def forward(self, x_BTD: Tensor, starts_BT: Tensor | None) -> Tensor:
        """Return the output of the layer, [B, T, D], for a normalized input."""
        inputs = self.read_input(self.project_in, x_BTD)
        channels = (x_BTC.unsqueeze(-1) for x_BTC in inputs)  # heads of one number
        mixed = self.core(*channels, starts_BT, taps_CS=self.taps, bias_C=self.bias)
        return self.out(mixed.flatten(2))

    def project_in(self, x_BTD: Tensor) -> TensorTuple:
        """Return the gates and the values, [B, T, C] each."""
        return self.project(x_BTD, "input_gate", "output_gate", "values")


def convolve_gated(
    input_gate: Tensor,
    output_gate: Tensor,
    values: Tensor,
    starts_BT: Tensor | None,
    taps_CS: Tensor,
    bias_C: Tensor | None,
) -> Tensor:
    """Return output_gate times the convolution of input_gate times values, [B, T, C, 1] as these.

    `starts_BT` are the starts of documents in their rows; without them, every row is one document."""
    x_BTC = (x.squeeze(-1) for x in (input_gate, output_gate, values))
    out_BTC = cast(Tensor, _GatedConvolution.apply(*x_BTC, taps_CS, bias_C, starts_BT))
    return out_BTC.unsqueeze(-1)


class _GatedConvolution(torch.autograd.Function):
    """The convolution and its gates, of which the backward pass computes all but the inputs again."""

    @staticmethod
    def forward(
        ctx: Any,
        input_gate: Tensor,
        output_gate: Tensor,
        values: Tensor,
        taps_CS: Tensor,
        bias_C: Tensor | None,
        starts_BT: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(input_gate, output_gate, values, taps_CS, bias_C, starts_BT)
        gated = at_least_fp32(input_gate) * values
        return causal_convolution(gated, taps_CS, bias_C, starts_BT).mul_(output_gate).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input_gate, output_gate, values, taps_CS, bias_C, starts_BT = ctx.saved_tensors
        gated = at_least_fp32(input_gate) * values
        grad_output_gate = causal_convolution(gated, taps_CS, bias_C, starts_BT).mul_(gradient).to(values.dtype)
        gradient = at_least_fp32(gradient) * output_gate
        grad_bias = None if bias_C is None else gradient.sum((0, 1)).to(bias_C.dtype)
        grad_gated, grad_taps = causal_convolution_backward(gradient, gated, taps_CS, starts_BT)
        del gradient, gated
        grad_input_gate = (grad_gated * values).to(values.dtype)
        grad_values = grad_gated.mul_(input_gate).to(values.dtype)
        return grad_input_gate, grad_output_gate, grad_values, grad_taps, grad_bias, None
