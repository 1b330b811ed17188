"""Texts about a layout."""

from __future__ import annotations

import pytest

from phalanx.spec.layout import Layout, describe_recomputation


@pytest.mark.parametrize(
    ("pp", "counts", "text"),
    [
        (1, None, "recompute full"),
        (1, 1, "recompute full in 1 block"),
        (1, (1,), "recompute full in 1 block"),
        (1, 3, "recompute full in 3 blocks"),
        (2, 1, "recompute full in 1 block a rank"),
        (2, (3, 2), "recompute full in 3/2 blocks a rank"),
    ],
)
def test_describe_recomputation_counts_blocks_of_rank(pp: int, counts: int | tuple[int, ...] | None, text: str) -> None:
    layout = Layout(pp=pp, activation_checkpointing="full", recomputed_blocks=counts)
    offloading = layout.replace(activation_checkpointing="offload")
    assert describe_recomputation(offloading) == f"{describe_recomputation(layout)}, offload inputs"
    assert describe_recomputation(layout) == text
