"""Expert parallelism (GShard, arXiv 2006.16668, section 3): ranks have different experts of every layer, and send each
other the tokens that chose them.

An all-to-all brings every token's row to the ranks of its experts, another brings back what they made of it: as many
rows as there are, none dropped and none padded. Experts that all tokens pass through work while the first is under way,
and in the backward pass while its gradients are.
These ranks are data-, context- or tensor-parallel ones to the rest of the model; those with the same experts sum the
gradients of these among themselves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.model.host_counts import to_host_lists
from phalanx.model.moe import (
    Experts,
    MoE,
    combine_expert_outputs,
    max_expert_rows,
    rows_of_choices,
    sort_by_expert,
)
from phalanx.model.transformer import Transformer
from phalanx.parallel.comm.wait_timer import WaitTimer
from phalanx.parallel.module_tensors import named_modules, named_parameters


class ExpertParallelGroup:
    """The ranks that have different experts."""

    def __init__(self, group: dist.ProcessGroup, permutation: Tensor | None = None) -> None:
        """The first rank has the first experts, and so on; or experts are ordered by `permutation`, [E + 1]."""
        self.group = group
        self.size = group.size()
        self.expert_permutation = permutation
        self.exposed = WaitTimer()
        self.waits = WaitTimer()
        """Of what `exposed` counts, that for all-to-alls."""
        self.rows = 0
        """That came, since they were last taken."""

    def wait(self, work: dist.Work | None) -> None:
        """For an exchange to end."""
        with self.exposed.measure(), self.waits.measure():
            if work is not None:
                work.wait()

    def pop_row_count(self) -> int:
        """How many came since the last call."""
        rows, self.rows = self.rows, 0
        return rows

    def start_all_to_all(
        self, rows: Tensor, send_counts: list[int], recv_counts: list[int]
    ) -> tuple[Tensor, dist.Work | None]:
        """Start to send `send_counts[i]` rows to rank i, in order, and to receive `recv_counts[j]` rows from rank j."""
        received = rows.new_empty(sum(recv_counts), *rows.shape[1:])
        work = dist.all_to_all_single(
            received, rows.contiguous(), recv_counts, send_counts, group=self.group, async_op=True
        )
        return received, work


def expert_parameter_names(module: nn.Module) -> frozenset[str]:
    """The parameters that ranks with different experts have apart."""
    owners = [f"{name}." for name, part in named_modules(module) if isinstance(part, Experts)]
    return frozenset(name for name, _ in named_parameters(module) if name.startswith(tuple(owners)))


def apply_expert_parallel(model: Transformer, ranks: ExpertParallelGroup) -> None:
    """Let the layers of a model, of whose experts this rank has its share, send tokens to the others."""
    for part in model.modules():
        if isinstance(part, MoE):
            part.forward = partial(_moe_forward, part, ranks)  # type: ignore[method-assign]


def _moe_forward(moe: MoE, ranks: ExpertParallelGroup, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """See MoE.forward."""
    weights, chosen, auxiliary = moe.router(x_BTD)
    chosen = chosen if ranks.expert_permutation is None else ranks.expert_permutation[chosen]
    order, counts_E = sort_by_expert(chosen, moe.router.moe.num_experts)
    # How many rows each rank sends to each expert of each other.
    recv_counts_E = torch.empty_like(counts_E)
    ranks.wait(dist.all_to_all_single(recv_counts_E, counts_E, group=ranks.group, async_op=True))
    both = torch.stack([counts_E, recv_counts_E]).unflatten(1, (ranks.size, -1)).sum(2)
    send_counts, recv_counts = to_host_lists(both, max_expert_rows(moe.router.moe, chosen))
    rows = rows_of_choices(x_BTD, order[: sum(send_counts)], moe.router.moe.top_k)
    if torch.is_autocast_enabled(rows.device.type):
        rows = rows.to(torch.get_autocast_dtype(rows.device.type))
    counts_by_source = recv_counts_E.view(ranks.size, -1)
    ranks.rows += sum(recv_counts)

    dispatch = InFlightDispatch(ranks, send_counts, recv_counts)
    in_flight_rows = _StartDispatch.apply(rows, dispatch)
    shared = moe.shared(x_BTD) if moe.shared is not None else None
    received = cast(Tensor, _FinishDispatch.apply(in_flight_rows, dispatch))

    local_expert = torch.arange(counts_by_source.shape[1], device=rows.device).repeat(ranks.size)
    by_expert = local_expert.repeat_interleave(recv_counts_E, output_size=sum(recv_counts)).argsort(stable=True)
    y = moe.experts(received[by_expert], counts_by_source.sum(0).cumsum(0))
    y = cast(Tensor, _Combine.apply(y[by_expert.argsort()], ranks, recv_counts, send_counts))
    out = combine_expert_outputs(y, order, weights).view_as(x_BTD)
    return out if shared is None else out + shared, auxiliary


@dataclass
class InFlightDispatch:
    """Rows on their way to experts, or their gradients on the way back."""

    ranks: ExpertParallelGroup
    send_counts: list[int]
    recv_counts: list[int]
    work: dist.Work | None = None
    gradient: Tensor | None = None
    """Where the gradients arrive."""

    def wait(self) -> None:
        """Until they are here."""
        self.ranks.wait(self.work)
        self.work = None


class _StartDispatch(torch.autograd.Function):
    """Send rows to their experts; what it returns is there after `_FinishDispatch`. Autograd runs backward what was
    done last first: what stands between the two works while gradients, too, are under way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, dispatch: InFlightDispatch) -> Tensor:
        ctx.dispatch = dispatch
        received, dispatch.work = dispatch.ranks.start_all_to_all(rows, dispatch.send_counts, dispatch.recv_counts)
        return received

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        dispatch = ctx.dispatch
        dispatch.wait()
        back, dispatch.gradient = dispatch.gradient, None
        return back, None


class _FinishDispatch(torch.autograd.Function):
    """Wait for rows; begin to send their gradients back, which are there after `_StartDispatch`."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, dispatch: InFlightDispatch) -> Tensor:
        ctx.dispatch = dispatch
        dispatch.wait()
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        dispatch = ctx.dispatch
        dispatch.gradient, dispatch.work = dispatch.ranks.start_all_to_all(
            gradient, dispatch.recv_counts, dispatch.send_counts
        )
        return gradient, None  # not of these rows, but on time: `_StartDispatch` has those


class _Combine(torch.autograd.Function):
    """Send rows, as many as came, to where they came from."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, ranks: ExpertParallelGroup, send_counts: list[int], recv_counts: list[int]
    ) -> Tensor:
        ctx.ranks = ranks
        ctx.send_counts = send_counts
        ctx.recv_counts = recv_counts
        back, work = ranks.start_all_to_all(rows, send_counts, recv_counts)
        ranks.wait(work)
        return back

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        back, work = ctx.ranks.start_all_to_all(gradient, ctx.recv_counts, ctx.send_counts)
        ctx.ranks.wait(work)
        return back, None, None, None
