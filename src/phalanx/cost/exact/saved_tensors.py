"""Bytes that blocks share of what a forward pass saves; `cost.exact.derive.saved` has those of their parts."""

from __future__ import annotations

from phalanx.cost.exact.forward_shape import INDEX_BYTES, ForwardShape
from phalanx.spec.model import ModelSpec


def saved_by_inputs(spec: ModelSpec, shape: ForwardShape, first: bool, recomputes: bool) -> int:
    """Return the bytes that the blocks of a stage share.

    Args:
        shape: Sizes of a micro-batch on one rank.
        first: True for the first stage, which also saves the tokens.
        recomputes: True if a block of the stage recomputes activations.
    """
    is_ring = shape.layout.cp > 1 and shape.layout.cp_method == "ring"
    # Positions restart with each document.
    num_positions = shape.tokens if shape.masked else shape.tokens // shape.batch
    # Embedding: indices, and a flag for rows on other ranks.
    token_bytes = shape.tokens * (INDEX_BYTES if shape.tp == 1 else INDEX_BYTES + 1)
    # Learned: the embedding's indices; for contiguous shards of tokens (ulysses) a view of the full row's.
    position_bytes = (num_positions if is_ring or shape.masked else shape.sequence) * INDEX_BYTES
    table_bytes = 2 * num_positions * spec.head_dim * shape.high_precision_bytes  # rope: products with cosine and sine
    # The mask is bool, for recomputation. A ring has the bounds of documents on the host.
    mask_bytes = shape.batch * shape.sequence**2 if shape.has_dense_mask(spec) and recomputes else 0
    saved_bytes = table_bytes if spec.position_embedding == "rope" else position_bytes if first else 0
    return saved_bytes + (token_bytes if first else 0) + mask_bytes
