"""Attention to a part of the keys, and the blocks that each step of a ring computes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.parallel import block_attention
from phalanx.parallel.block_attention import attention_backward, attention_with_lse, find_ring_blocks
from phalanx.parallel.context_parallel import local_token_indices
from tests.helpers.batches import locate_documents, starts_of_lengths


@st.composite
def rings(draw: st.DrawFn) -> tuple[int, int, list[list[int]]]:
    """Return ranks, tokens of a row, and the lengths of each row's documents."""
    ranks = draw(st.integers(1, 5))
    tokens = 2 * ranks * draw(st.integers(1, 4))
    rows = draw(st.lists(st.sets(st.integers(1, tokens - 1)), min_size=1, max_size=3))
    bounds = [[0, *sorted(cuts), tokens] for cuts in rows]
    return ranks, tokens, [[end - start for start, end in pairwise(row)] for row in bounds]


@given(rings(), st.booleans())
def test_ring_blocks_cover_each_visible_pair_once(ring: tuple[int, int, list[list[int]]], has_bounds: bool) -> None:
    ranks, tokens, lengths = ring
    lengths = lengths if has_bounds else [[tokens] for _ in lengths]
    documents = locate_documents(starts_of_lengths(lengths))
    bounds = documents.bounds.tolist() if has_bounds else None
    counts = torch.zeros(len(lengths), tokens, tokens, dtype=torch.int64)
    for rank in range(ranks):
        queries = local_token_indices(tokens, ranks, rank, method="ring")
        for step, blocks in enumerate(find_ring_blocks(rank, ranks, tokens, bounds).steps):
            keys = local_token_indices(tokens, ranks, (rank - step) % ranks, method="ring")
            for block in blocks:
                seen = torch.ones(len(queries[block.queries]), len(keys[block.keys]), dtype=torch.int64)
                rows = torch.arange(len(lengths))[block.rows]
                pairs = (rows[:, None, None], queries[block.queries][:, None], keys[block.keys])
                counts[pairs] += seen.tril() if block.causal else seen
    same_document = documents.starts[:, :, None] == documents.starts[:, None]
    assert torch.equal(counts, same_document.tril().long())


def test_first_step_of_ring_is_causal_and_covers_all_queries() -> None:
    """Later steps merge their results into those of the first."""
    bounds = list(accumulate([1, 5, 1, 1, 8], initial=0))
    for rank in range(4):
        first, *later = find_ring_blocks(rank, 4, 16, bounds).steps
        assert sorted(index for block in first for index in range(4)[block.queries]) == list(range(4))
        assert all(block.causal for block in first)
        assert not any(block.causal for blocks in later for block in blocks)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_plain_attention_equals_flash_kernel(dtype: torch.dtype, causal: bool) -> None:
    torch.manual_seed(0)
    q, gradient = torch.randn(2, 2, 6, 10, 8, dtype=dtype)
    k, v = torch.randn(2, 2, 3, 10, 8, dtype=dtype)

    def computed(forward: Callable[..., Any], backward: Callable[..., Any]) -> list[Tensor]:
        out, lse = forward(q, k, v, causal=causal)
        return [out, lse, *backward(gradient, q, k, v=v, out=out, lse=lse, causal=causal)]

    plain = computed(block_attention._plain_attention, block_attention._plain_attention_backward)
    for ours, flash in zip(plain, computed(attention_with_lse, attention_backward), strict=True):
        assert ours.dtype == flash.dtype
        assert (ours - flash).norm() < 4 * torch.finfo(dtype).eps * flash.norm()
