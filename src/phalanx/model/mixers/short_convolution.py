"""Gated short convolution (LFM2, arXiv 2511.23404).

Shapes: B batch, T tokens, D width, C channels of this rank, S taps."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from phalanx.model.dtypes import at_least_fp32
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
        return (None if context.documents is None else context.documents.starts,)

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


def causal_convolution(x_BTC: Tensor, taps_CS: Tensor, bias_C: Tensor | None, starts_BT: Tensor | None) -> Tensor:
    """Return for each channel the sum of the last S tokens of its document times taps, [B, T, C].

    The last tap is the current token's, as in PyTorch's Conv1d."""
    out_BTC = x_BTC * taps_CS[:, -1]
    if bias_C is not None:
        out_BTC += bias_C
    for lag in range(1, min(taps_CS.shape[1], x_BTC.shape[1])):
        out_BTC[:, lag:].addcmul_(
            _hide_documents(x_BTC[:, :-lag], lag, starts_BT), taps_CS[:, -1 - lag].to(x_BTC.dtype)
        )
    return out_BTC


def causal_convolution_backward(
    gradient_BTC: Tensor, x_BTC: Tensor, taps_CS: Tensor, starts_BT: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the taps (`causal_convolution`)."""
    grad_x_BTC = gradient_BTC * taps_CS[:, -1]
    grad_taps = torch.zeros_like(taps_CS)
    grad_taps[:, -1] = (gradient_BTC * x_BTC).sum((0, 1))
    for lag in range(1, min(taps_CS.shape[1], x_BTC.shape[1])):
        visible = _hide_documents(gradient_BTC[:, lag:], lag, starts_BT)
        grad_x_BTC[:, :-lag].addcmul_(visible, taps_CS[:, -1 - lag].to(x_BTC.dtype))
        grad_taps[:, -1 - lag] = (visible * x_BTC[:, :-lag]).sum((0, 1))
    return grad_x_BTC, grad_taps


def _hide_documents(x: Tensor, lag: int, starts_BT: Tensor | None) -> Tensor:
    """Return the values of pairs of tokens with a distance of `lag`, 0 where they are of two documents."""
    if starts_BT is None:
        return x
    later_T = torch.arange(lag, starts_BT.shape[1], device=x.device)
    return x * (later_T - lag >= starts_BT[:, lag:])[..., None]
