"""Ring attention on ranks equals dense attention of full rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.model.attention import attend, document_mask
from phalanx.model.sequence_context import Documents
from phalanx.parallel import context_parallel
from phalanx.parallel.activation_checkpointing import apply_activation_checkpointing
from phalanx.parallel.context_parallel import (
    ContextParallelGroup,
    _build_document_ring,
    _ring_attention,
    apply_context_parallel,
    local_token_indices,
)
from phalanx.testing import rank_pool
from tests.helpers.batches import locate_documents, starts_of_lengths
from tests.helpers.random_models import build_model

LENGTHS = {
    "whole": [[32], [32]],
    "ones": [[1] * 32, [32]],
    "mixed": [[5, 1, 11, 1, 14], [31, 1]],
    "across-pieces": [[3, 26, 3], [1, 1, 30]],
    "at-pieces": [[4, 4, 8, 16], [16, 16]],
}
HEADS = {"equal": (2, 2), "grouped": (6, 2)}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
Case = tuple[str, str, torch.dtype]
CASES = list(product(LENGTHS, HEADS, DTYPES))


def make_operands(case: Case) -> list[Tensor]:
    """Return queries, keys, values and the gradient of the output of full rows, [B, T, H, K]."""
    lengths, heads, dtype = case
    torch.manual_seed(0)
    query_heads, kv_heads = HEADS[heads]
    counts = (query_heads, kv_heads, kv_heads, query_heads)
    return [torch.randn(len(LENGTHS[lengths]), sum(LENGTHS[lengths][0]), n, 8, dtype=dtype) for n in counts]


def attend_on_rank(cp: ContextParallelGroup, operands: Sequence[Tensor], documents: Documents | None) -> list[Tensor]:
    """Return the output and gradients of this rank's tokens."""
    indices = cp.local_token_indices(operands[0].shape[1], torch.device("cpu"))
    *qkv, gradient = (x[:, indices] for x in operands)
    leaves = [x.requires_grad_() for x in qkv]
    ring = None if documents is None else _build_document_ring(cp, documents, gradient.dtype, gradient.shape[-1])
    out = _ring_attention(cp, *leaves, ring)
    out.backward(gradient)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def attend_on_rank_in_cases(cases: list[Case]) -> list[list[Tensor]]:
    cp = ContextParallelGroup(dist.group.WORLD, "ring")
    results = []
    for case in cases:
        documents = locate_documents(starts_of_lengths(LENGTHS[case[0]]))
        results.append(attend_on_rank(cp, make_operands(case), documents))
        if case[0] == "whole":
            unbounded = attend_on_rank(cp, make_operands(case), None)
            torch.testing.assert_close(results[-1], unbounded, rtol=0, atol=4 * torch.finfo(case[2]).eps)
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_ring_attention_equals_dense_attention_in_fp64(ranks: int) -> None:
    by_rank = rank_pool(ranks).run(attend_on_rank_in_cases, CASES)
    for case, *parts in zip(CASES, *by_rank, strict=True):
        *qkv, gradient = (x.double() for x in make_operands(case))
        leaves = [x.requires_grad_() for x in qkv]
        out = attend(*leaves, document_mask(starts_of_lengths(LENGTHS[case[0]])))
        out.backward(gradient)
        for index, expected in enumerate([out.detach(), *(leaf.grad for leaf in leaves)]):
            for rank, part in enumerate(parts):
                local = expected[:, local_token_indices(expected.shape[1], ranks, rank, method="ring")]
                error = (part[index].double() - local).norm() / max(local.norm(), gradient.norm())
                assert part[index].dtype == case[2]
                assert error < 4 * torch.finfo(case[2]).eps, (case, rank, index)


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation has returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = (leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        self.elements = max(self.elements, *sizes, 0)
        return out


def count_largest_tensor(tokens: int) -> int:
    cp = ContextParallelGroup(dist.group.WORLD, "ring")
    operands = [torch.randn(1, tokens, 1, 8) for _ in range(4)]
    documents = locate_documents(starts_of_lengths([[tokens // 3, tokens - tokens // 3]]))
    with LargestTensor() as largest:
        attend_on_rank(cp, operands, documents)
    return largest.elements


def test_ring_attention_has_no_tensor_of_token_pairs() -> None:
    assert rank_pool(2).run(count_largest_tensor, 1024) == [1024 * 8] * 2  # the full queries of this test


def count_bound_reads(mode: str) -> tuple[int, Tensor]:
    """Return how often a training step of two layers reads documents' bounds, and its logits."""
    model = build_model()
    apply_context_parallel(model, ContextParallelGroup(dist.group.WORLD, "ring"))
    apply_activation_checkpointing(model, mode)
    starts = starts_of_lengths(LENGTHS["mixed"])
    tokens = torch.arange(64).view(2, 32) % 53
    indices = local_token_indices(32, 2, dist.get_rank(), method="ring")
    with mock.patch.object(context_parallel, "find_ring_blocks", wraps=context_parallel.find_ring_blocks) as find:
        logits, _ = model(tokens[:, indices], locate_documents(starts))
        logits.sum().backward()
    return find.call_count, logits.detach()


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_ring_reads_bounds_once_for_all_layers_and_their_recomputation(mode: str) -> None:
    results = rank_pool(2).run(count_bound_reads, mode)
    tokens = torch.arange(64).view(2, 32) % 53
    expected, _ = build_model()(tokens, locate_documents(starts_of_lengths(LENGTHS["mixed"])))
    for rank, (count, logits) in enumerate(results):
        assert count == 1
        local = expected[:, local_token_indices(32, 2, rank, method="ring")]
        torch.testing.assert_close(logits, local, rtol=0, atol=1e-12)
