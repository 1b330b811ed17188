"""A sum over ranks inside a loss."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.comm.wait_timer import WaitTimer


def sum_over_ranks(terms: Tensor, group: dist.ProcessGroup, wait: WaitTimer) -> Tensor:
    """Return the sum over ranks of each one's terms, for a loss of which every rank has an equal share.

    With R ranks, each of which computes 1 / R of the loss from the same sums, the gradient of the whole loss with
    respect to a rank's own terms is R times that of its share."""
    return cast(Tensor, _SumOverRanks.apply(terms, group, wait)) if terms.numel() else terms


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, terms: Tensor, group: dist.ProcessGroup, wait: WaitTimer) -> Tensor:
        ctx.ranks = group.size()
        total = terms.clone()
        with wait.measure():
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.ranks, None, None
