"""Kimi Delta Attention (Kimi Linear, arXiv 2510.26692)."""

from __future__ import annotations

from torch import Tensor

from phalanx.model.mixers.gated_delta import GatedDelta
from phalanx.model.part import multiply_each
from phalanx.model.products import ProductLinear, TensorTuple


class KimiDelta(GatedDelta):
    """The gated delta rule with decays of channels, which are products of a latent, as is the gate of the output."""

    decay_latent: ProductLinear
    output_gate_latent: ProductLinear

    def project_heads(self, x_BTD: Tensor) -> TensorTuple:
        """Return the gate of the output, and the products that the rule reads."""
        q, k, v, b, decay_latent, gate_latent = self.read_input(self.project_in, x_BTD)
        (a,) = self.project(decay_latent, "decay")
        (z,) = self.project(gate_latent, "output_gate")
        return z, q, k, v, a, b

    def project_in(self, x_BTD: Tensor) -> TensorTuple:
        """Return queries, keys, values, what updates depend on, and the latents of decays and of the gate."""
        heads = self.project(x_BTD, "query", "key", "value", "update")
        return *heads, *multiply_each(x_BTD, self.decay_latent, self.output_gate_latent)
