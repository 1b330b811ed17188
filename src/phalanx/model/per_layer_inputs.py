"""Inputs of layers besides the residual stream (`spec.parts.per_layer_inputs`).

Shapes: B batch, T tokens, D width, L layers, P width of an input."""

from __future__ import annotations

import math

from torch import Tensor

from phalanx.model.embedding import Embedding, scaled
from phalanx.model.mlp import MLP
from phalanx.model.norm import RMSNorm
from phalanx.model.part import PartModule
from phalanx.model.products import ProductLinear, activated_linear
from phalanx.model.sequence_context import compute_dtype
from phalanx.spec.parts.operations import Part


class PerLayerInputs(PartModule):
    """(norm(W x / sqrt(D)) + sqrt(P) e) / sqrt(2), of the token's rows x and e of two embeddings, for each layer."""

    embedding: Embedding
    projection: ProductLinear
    norm: RMSNorm

    def __init__(self, part: Part) -> None:
        super().__init__(part)
        (self.size,) = part.parameters["norm.weight"].shape

    def forward(self, tokens_BT: Tensor, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Return the input of each layer, [B, T, P]; `x_BTD` is that of the first block."""
        rows_BTLP = scaled(self.embedding(tokens_BT), math.sqrt(self.size)).unflatten(-1, (-1, self.size))
        projected = self.projection(x_BTD) * x_BTD.shape[-1] ** -0.5
        total_BTLP = (self.norm(projected.unflatten(-1, (-1, self.size))) + rows_BTLP) * 2**-0.5
        # Cast once, because all layers keep parts of it. `unbind` has one gradient for all layers.
        return total_BTLP.to(compute_dtype(x_BTD)).unbind(-2)


class PerLayerBranch(MLP):
    """down(activation(gate x) * y) of the residual stream x and an input y of the layer."""

    def forward(self, x_BTD: Tensor, given_BTP: Tensor) -> Tensor:  # type: ignore[override]
        """Return what the layer adds to the residual stream, before its norm."""
        return activated_linear(self.down, self.activation, *self.read_input(self.project_in, x_BTD), given_BTP)
