"""Models with more tokens than their initial weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.spec.base import require

Weights = Callable[[str, torch.Size], Tensor]


def extend_vocabulary(weights: Weights, source_vocab: int, vocab: int) -> Weights:
    """Return initial weights by name for a larger vocabulary.

    Rows of new tokens are the mean of the source rows, which leaves the probabilities of the source tokens nearly
    unchanged (nlp.stanford.edu/~johnhew/vocab-expansion.html). Raises UserError if `vocab` is less than `source_vocab`.
    """
    problem = f"is less than the {source_vocab} tokens of model.from_hf"
    fix = f"set model.vocab_size to at least {source_vocab}, or remove it"
    require(vocab >= source_vocab, "model.vocab_size", vocab, problem, fix)
    if vocab == source_vocab:
        return weights

    def extended_weight(name: str, shape: torch.Size) -> Tensor:
        if name not in ("embedding.weight", "head.weight"):
            return weights(name, shape)
        known_VD = weights(name, torch.Size([source_vocab, *shape[1:]]))
        mean_D = known_VD.mean(dim=0, dtype=torch.float32).to(known_VD.dtype)
        return torch.cat([known_VD, mean_D.expand(vocab - source_vocab, -1)])

    return extended_weight
