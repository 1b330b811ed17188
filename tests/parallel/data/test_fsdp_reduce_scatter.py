"""ZeRO-3's reduce-scatter on gloo, compared with PyTorch's own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.comm.wait_timer import WaitTimer
from phalanx.parallel.data.fsdp import DeferredReduceScatter
from phalanx.testing import rank_pool

SHARD_SIZES = (3, 1, 5)
"""Elements that a rank keeps of each of three blocks."""


def make_gradient_blocks(dtype: torch.dtype) -> list[Tensor]:
    """Return this rank's gradients of three blocks, of which each rank keeps a shard."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [
        torch.randn(size * dist.get_world_size(), generator=generator, dtype=torch.float64).to(dtype)
        for size in SHARD_SIZES
    ]


def reduce_with_phalanx_and_torch(
    deferred: bool, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], list[bool], float]:
    """Return our sums and PyTorch's, which of ours were complete before `finish`, and the seconds waited."""
    group, timer = dist.group.WORLD, WaitTimer()
    assert group is not None
    reduce_scatter = DeferredReduceScatter(timer, deferred)
    ours = [torch.full((size,), torch.nan, dtype=dtype) for size in SHARD_SIZES]
    theirs = [torch.empty(size, dtype=dtype) for size in SHARD_SIZES]
    for block, out in zip(make_gradient_blocks(dtype), ours, strict=True):
        reduce_scatter(out, block, group, dist.ReduceOp.SUM)
    is_complete = [not bool(out.isnan().any()) for out in ours]
    reduce_scatter.finish()
    reduce_scatter.finish()  # nothing is left to end
    for block, out in zip(make_gradient_blocks(dtype), theirs, strict=True):
        dist.reduce_scatter_tensor(out, block, group=group)
    return ours, theirs, is_complete, timer.pop_seconds()


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_deferred_reduce_scatter_equals_torch_reduce_scatter(world_size: int, deferred: bool) -> None:
    for ours, theirs, is_complete, seconds in rank_pool(world_size).run(
        reduce_with_phalanx_and_torch, deferred, torch.float64
    ):
        for our, their in zip(ours, theirs, strict=True):
            torch.testing.assert_close(our, their, rtol=1e-14, atol=1e-14)
        assert is_complete == [True, True, not deferred]  # a reduction ends when the next one begins
        assert seconds > 0


def test_deferred_reduce_scatter_in_fp32_is_close_to_torch() -> None:
    for ours, theirs, _, _ in rank_pool(2).run(reduce_with_phalanx_and_torch, True, torch.float32):
        for our, their in zip(ours, theirs, strict=True):
            torch.testing.assert_close(our, their)
