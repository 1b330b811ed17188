"""The part of a transformer on one pipeline rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.model.sequence_context import Documents
from phalanx.model.transformer import Ahead, HeadFunction, Transformer
from phalanx.parallel.pipeline.split_backward import DeferredWeightGrads
from phalanx.spec.model import ModelSpec


@dataclass(frozen=True)
class InferenceMicroBatch:
    """A micro-batch without targets."""

    tokens: Tensor
    documents: Documents | None
    token_keys: None = None


class StageModule(Transformer):
    """The stages of one rank: a transformer without the blocks, embedding and head of other ranks.

    Parameters have the same names as in the full model."""

    def __init__(self, spec: ModelSpec, layers: Mapping[int, range], stages: int) -> None:
        """Create this rank's stages of a pipeline of `stages` stages.

        `layers` maps each of its stages to its blocks."""
        super().__init__(spec)
        self.num_forward_only_blocks = 0
        self.layers = dict(layers)
        self.last = stages - 1
        local_blocks = {str(layer): self.blocks[layer] for stage_layers in layers.values() for layer in stage_layers}
        self.blocks = nn.ModuleDict(local_blocks)  # type: ignore[assignment]
        self.deferred_weight_grads = DeferredWeightGrads()
        self.has_embedding_copy = 0 not in layers and self.last in layers and spec.reuses_embedding
        """True if the embedding is a copy of that which another rank trains, and no parameter."""
        if 0 not in layers:
            del self.embedding.weight
            if not self.has_embedding_copy:
                del self.embedding
            if spec.position_embedding == "learned":
                del self.positions
        if self.last not in layers:
            del self.norm
            if not spec.tie_embeddings:
                del self.head

    def forward(
        self,
        x: Tensor,
        documents: Documents | None = None,
        head: HeadFunction | None = None,
        ahead: Ahead | None = None,
        stage: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Return the output of a stage of this rank, or the logits of the last stage, and its auxiliary loss.

        The input is [B, T, D], for the first stage the tokens, [B, T]. The result of `head` replaces the logits."""
        x_BTD = self.embed(x, documents) if stage == 0 else x
        layers = (layer for layer in self.layers[stage] if layer < self.spec.num_layers)
        blocks = [self.blocks[str(layer)] for layer in layers]  # type: ignore[call-overload]
        if stage == self.last:
            embeddings = () if ahead is None else self.embed(torch.cat([*ahead.tokens]), documents).split(len(x_BTD))
            return self.finish(blocks, x_BTD, documents, head, ahead, embeddings)
        x_BTD, auxiliary = self.run_blocks(blocks, x_BTD, self.sequence_context(x_BTD, documents))
        return x_BTD, self.sum_auxiliary(auxiliary)
