"""Kimi Delta Attention (Kimi Linear, arXiv 2510.26692)."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from phalanx.model.mixers.gated_delta import Form, GatedDelta
from phalanx.model.part import multiply_each
from phalanx.model.products import ProductLinear, TensorTuple
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.mixers import KimiDelta as KimiDeltaSpec
from phalanx.spec.parts.operations import Part


class KimiDelta(GatedDelta):
    """The gated delta rule with decays of channels, which may be products of a latent, as the gate of the output."""

    decay_latent: ProductLinear
    output_gate_latent: ProductLinear

    def __init__(self, layer: ModelSpec, part: Part) -> None:
        """Create the mixer of a layer (`spec.layers`) from its declaration."""
        super().__init__(layer, part)
        self.has_latents = cast(KimiDeltaSpec, layer.mixer).has_latents

    def form(self, layer: ModelSpec) -> Form:
        """Return the form of the rule in a layer."""
        return Form(decay_bound=cast(KimiDeltaSpec, layer.mixer).decay_bound)

    def project_heads(self, x_BTD: Tensor) -> TensorTuple:
        """Return the gate of the output, and the products that the rule reads."""
        q, k, v, b, a, z = self.read_input(self.project_in, x_BTD)
        if self.has_latents:
            (a,) = self.project(a, "decay")
            (z,) = self.project(z, "output_gate")
        return z, q, k, v, a, b

    def project_in(self, x_BTD: Tensor) -> TensorTuple:
        """Return queries, keys, values, what updates depend on, and decays and the gate, or their latents."""
        heads = ("query", "key", "value", "update")
        if not self.has_latents:
            return self.project(x_BTD, *heads, "decay", "output_gate")
        return *self.project(x_BTD, *heads), *multiply_each(x_BTD, self.decay_latent, self.output_gate_latent)
