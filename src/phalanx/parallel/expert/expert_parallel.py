"""Expert parallelism (GShard, arXiv 2006.16668, section 3): ranks have different experts.

An all-to-all sends every token's row to the ranks of its experts, a second returns the experts' outputs. Exactly the
chosen rows are sent, none dropped and none padded. Shared experts compute during the first all-to-all, and in the
backward pass during that of its gradients. For the rest of the model these ranks are data-, context- or tensor-parallel
ranks. Ranks with the same experts sum the gradients of these experts.

Why: `docs/design/decisions/late-token-gradients.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.model.host_counts import to_host_lists
from phalanx.model.moe import MoE, max_expert_rows, sort_by_expert
from phalanx.model.part import modules_declaring
from phalanx.model.transformer import Transformer
from phalanx.parallel.comm.wait_timer import WaitTimer
from phalanx.parallel.module_tensors import named_modules, named_parameters
from phalanx.spec.parts.operations import Dispatch, GroupedLinear


class ExpertParallelGroup:
    """The ranks that have different experts."""

    def __init__(self, group: dist.ProcessGroup, permutation: Tensor | None = None) -> None:
        """Create the group; experts are in rank order, or in the order of `permutation`, [E + 1]."""
        self.group = group
        self.size = group.size()
        self.expert_permutation = permutation
        self.comm_wait = WaitTimer()
        self.all_to_all_wait = WaitTimer()
        """The part of `comm_wait` that is spent in all-to-alls."""
        self.rows = 0
        """Number of rows received since the last `pop_row_count`."""

    def wait(self, work: dist.Work | None) -> None:
        """Wait for a pending exchange, if any."""
        with self.comm_wait.measure(), self.all_to_all_wait.measure():
            if work is not None:
                work.wait()

    def pop_row_count(self) -> int:
        """Return the number of rows received since the last call."""
        rows, self.rows = self.rows, 0
        return rows

    def start_all_to_all(
        self, rows: Tensor, send_counts: list[int], recv_counts: list[int]
    ) -> tuple[Tensor, dist.Work | None]:
        """Start to exchange rows with all ranks of the group.

        Args:
            rows: Rows to send, [rows, ...], in the order of the receiving ranks.
            send_counts: Number of rows to each rank.
            recv_counts: Number of rows from each rank.

        Returns:
            The receive buffer, in the order of the sending ranks, and the pending work.
        """
        received = rows.new_empty(sum(recv_counts), *rows.shape[1:])
        work = dist.all_to_all_single(
            received, rows.contiguous(), recv_counts, send_counts, group=self.group, async_op=True
        )
        return received, work


def expert_parameter_names(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters of experts, which differ between expert-parallel ranks."""
    experts = set(modules_declaring(module, GroupedLinear))
    owners = [f"{name}." for name, part in named_modules(module) if part in experts]
    return frozenset(name for name, _ in named_parameters(module) if name.startswith(tuple(owners)))


def apply_expert_parallel(model: Transformer, ep: ExpertParallelGroup) -> None:
    """Make the expert layers of a model, with this rank's experts, send tokens to the other ranks."""
    for mixture in modules_declaring(model, Dispatch):
        mixture.mix = partial(_mix_with_exchange, ep)


def _mix_with_exchange(ep: ExpertParallelGroup, moe: MoE, x_BTD: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Return the output of a layer, with tokens sent to their experts' ranks."""
    plan = _plan_dispatch(moe, ep, chosen)
    rows = moe.expert_rows(moe.to_experts(x_BTD), weights, plan.order[: sum(plan.send_counts)])
    ep.rows += sum(plan.recv_counts)

    dispatch = InFlightDispatch(ep=ep, send_counts=plan.send_counts, recv_counts=plan.recv_counts)
    in_flight_rows = _StartDispatch.apply(rows, dispatch)
    shared = moe.apply_shared(x_BTD)
    received = cast(Tensor, _FinishDispatch.apply(in_flight_rows, dispatch))

    by_expert = plan.order_received_rows()
    sorted_rows = received[by_expert]
    del rows, in_flight_rows, received  # no backward pass needs them
    y = moe.experts(sorted_rows, plan.recv_rows.sum(0).cumsum(0))
    y = y[by_expert.argsort()]
    y = cast(Tensor, _Combine.apply(y, ep, plan.recv_counts, plan.send_counts))
    out = moe.from_experts(moe.combine(y, plan.order, weights).view(*x_BTD.shape[:-1], -1))
    return out if shared is None else out + shared


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """The rows that a rank sends to the ranks of their experts, and those that it receives."""

    order: Tensor
    """Order of this rank's choices by expert, [N k]; dropped choices come last."""
    recv_rows: Tensor
    """Number of rows from each rank for each expert of this rank, [ranks, local experts]."""
    send_counts: list[int]
    """Number of rows to each rank."""
    recv_counts: list[int]
    """Number of rows from each rank."""

    def order_received_rows(self) -> Tensor:
        """Return the order of the received rows, which are sorted by rank, then by expert, by expert alone."""
        ranks, local_experts = self.recv_rows.shape
        local_expert = torch.arange(local_experts, device=self.recv_rows.device).repeat(ranks)
        expert_of_row = local_expert.repeat_interleave(self.recv_rows.flatten(), output_size=sum(self.recv_counts))
        return expert_of_row.argsort(stable=True)


def _plan_dispatch(moe: MoE, ep: ExpertParallelGroup, chosen_BTk: Tensor) -> DispatchPlan:
    """Sort the choices by expert, and exchange their numbers with the other ranks. The host waits once."""
    chosen = chosen_BTk if ep.expert_permutation is None else ep.expert_permutation[chosen_BTk]
    order, counts_E = sort_by_expert(chosen, moe.router.moe.num_experts)
    recv_counts_E = torch.empty_like(counts_E)
    ep.wait(dist.all_to_all_single(recv_counts_E, counts_E, group=ep.group, async_op=True))
    both_by_rank = torch.stack([counts_E, recv_counts_E]).unflatten(1, (ep.size, -1)).sum(2)
    send_counts, recv_counts = to_host_lists(both_by_rank, max_expert_rows(moe.router.moe, chosen))
    return DispatchPlan(
        order=order, recv_rows=recv_counts_E.view(ep.size, -1), send_counts=send_counts, recv_counts=recv_counts
    )


@dataclass(kw_only=True)
class InFlightDispatch:
    """A pending all-to-all of rows to experts, or of their gradients in the opposite direction."""

    ep: ExpertParallelGroup
    send_counts: list[int]
    recv_counts: list[int]
    work: dist.Work | None = None
    gradient: Tensor | None = None
    """Receive buffer of the gradients."""

    def wait(self) -> None:
        """Wait for the exchange."""
        self.ep.wait(self.work)
        self.work = None


class _StartDispatch(torch.autograd.Function):
    """Send rows to their experts; the output is valid after `_FinishDispatch`.

    Autograd runs backward functions in reverse order. Operations between the two functions thus overlap the exchange of
    gradients, too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, dispatch: InFlightDispatch) -> Tensor:
        ctx.dispatch = dispatch
        received, dispatch.work = dispatch.ep.start_all_to_all(rows, dispatch.send_counts, dispatch.recv_counts)
        return received

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        dispatch = ctx.dispatch
        dispatch.wait()
        back, dispatch.gradient = dispatch.gradient, None
        return back, None


class _FinishDispatch(torch.autograd.Function):
    """Wait for rows; in backward, start to send their gradients, which are valid after `_StartDispatch`."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, dispatch: InFlightDispatch) -> Tensor:
        ctx.dispatch = dispatch
        dispatch.wait()
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        dispatch = ctx.dispatch
        dispatch.gradient, dispatch.work = dispatch.ep.start_all_to_all(
            gradient, dispatch.recv_counts, dispatch.send_counts
        )
        return gradient, None  # a placeholder that keeps the order: `_StartDispatch` returns the received gradients


class _Combine(torch.autograd.Function):
    """Return the received rows to their source ranks."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, ep: ExpertParallelGroup, send_counts: list[int], recv_counts: list[int]
    ) -> Tensor:
        ctx.ep = ep
        ctx.send_counts = send_counts
        ctx.recv_counts = recv_counts
        back, work = ep.start_all_to_all(rows, send_counts, recv_counts)
        ep.wait(work)
        return back

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        back, work = ctx.ep.start_all_to_all(gradient, ctx.recv_counts, ctx.send_counts)
        ctx.ep.wait(work)
        return back, None, None, None
