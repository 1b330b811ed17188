"""Models with more tokens than their initial weights."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.model.init import Part, PartialWeights, Weights, part_of_weight
from phalanx.spec.base import require

TABLES = ("embedding.weight", "per_layer_inputs.embedding.weight", "head.weight")
"""Parameters with a row for each token."""


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

    def extended_part(name: str, shape: torch.Size, part: Part) -> Tensor:
        if name not in TABLES:
            return part_of_weight(weights, name, shape, part)
        rows, columns = part
        source_shape = torch.Size([source_vocab, *shape[1:]])
        known_rows = slice(min(rows.start, source_vocab), min(rows.stop, source_vocab))
        known = part_of_weight(weights, name, source_shape, (known_rows, columns))
        num_new = rows.stop - max(rows.start, source_vocab)
        if num_new <= 0:
            return known
        all_rows = part_of_weight(weights, name, source_shape, (slice(0, source_vocab), columns))
        mean = all_rows.mean(dim=0, dtype=torch.float32).to(known.dtype)
        return torch.cat([known, mean.expand(num_new, -1)])

    return PartialWeights(extended_part)
