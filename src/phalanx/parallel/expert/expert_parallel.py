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

from phalanx.model.moe import Experts, MoE, combine_expert_outputs, permute_by_expert, to_host_list
from phalanx.model.transformer import Transformer
from phalanx.parallel.comm.wait_timer import WaitTimer
from phalanx.parallel.module_tensors import named_modules, named_parameters


class ExpertParallelGroup:
    """The ranks that have different experts."""

    def __init__(self, group: dist.ProcessGroup, places: Tensor | None = None) -> None:
        """The first rank has the first experts, and so on; or experts by their `places`, [E + 1]."""
        self.group, self.size, self.expert_permutation = group, group.size(), places
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

    def start_all_to_all(self, rows: Tensor, sent: list[int], came: list[int]) -> tuple[Tensor, dist.Work | None]:
        """Start to send `sent[i]` rows to rank i, the first first; `came[j]` rows will be from rank j."""
        received = rows.new_empty(sum(came), *rows.shape[1:])
        work = dist.all_to_all_single(received, rows.contiguous(), came, sent, group=self.group, async_op=True)
        return received, work


def expert_parameter_names(module: nn.Module) -> frozenset[str]:
    """The parameters that ranks with different experts have apart."""
    owners = [f"{name}." for name, part in named_modules(module) if isinstance(part, Experts)]
    return frozenset(name for name, _ in named_parameters(module) if name.startswith(tuple(owners)))


def apply_expert_parallel(model: Transformer, ranks: ExpertParallelGroup) -> None:
    """Let the layers of a model, of whose experts this rank has its share, send tokens to the others."""
    for part in model.modules():
        if isinstance(part, MoE):
            part.forward = partial(_forward, part, ranks)  # type: ignore[method-assign]


def _forward(moe: MoE, ranks: ExpertParallelGroup, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """See MoE.forward."""
    weights, chosen, auxiliary = moe.router(x_BTD)
    chosen = chosen if ranks.expert_permutation is None else ranks.expert_permutation[chosen]
    rows, order, counts_E = permute_by_expert(x_BTD, chosen, moe.router.moe)
    if torch.is_autocast_enabled(rows.device.type):
        rows = rows.to(torch.get_autocast_dtype(rows.device.type))
    # How many rows each rank sends to each expert of each other.
    theirs = torch.empty_like(counts_E)
    ranks.wait(dist.all_to_all_single(theirs, counts_E, group=ranks.group, async_op=True))
    sent = to_host_list(counts_E.view(ranks.size, -1).sum(1), len(rows))
    by_source = theirs.view(ranks.size, -1)
    came = to_host_list(by_source.sum(1), len(rows))

    ranks.rows += sum(came)

    under_way = InFlightDispatch(ranks, sent, came)
    coming = _StartDispatch.apply(rows, under_way)
    shared = moe.shared(x_BTD) if moe.shared is not None else None
    arrived = cast(Tensor, _FinishDispatch.apply(coming, under_way))

    local = torch.arange(by_source.shape[1], device=rows.device).repeat(ranks.size)
    by_expert = local.repeat_interleave(theirs, output_size=sum(came)).argsort(stable=True)
    y = moe.experts(arrived[by_expert], by_source.sum(0).cumsum(0))
    y = cast(Tensor, _Combine.apply(y[by_expert.argsort()], ranks, came, sent))
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
    """Send rows to their experts; what it returns is there after `_Arrive`. Autograd runs backward what was done last
    first: what stands between the two works while gradients, too, are under way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, under_way: InFlightDispatch) -> Tensor:
        ctx.under_way = under_way
        received, under_way.work = under_way.ranks.start_all_to_all(rows, under_way.send_counts, under_way.recv_counts)
        return received

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        of = ctx.under_way
        of.wait()
        back, of.gradient = of.gradient, None
        return back, None


class _FinishDispatch(torch.autograd.Function):
    """Wait for rows; begin to send their gradients back, which are there after `_Depart`."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, under_way: InFlightDispatch) -> Tensor:
        ctx.under_way = under_way
        under_way.wait()
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        of = ctx.under_way
        of.gradient, of.work = of.ranks.start_all_to_all(gradient, of.recv_counts, of.send_counts)
        return gradient, None  # not of these rows, but on time: `_Depart` has those


class _Combine(torch.autograd.Function):
    """Send rows, as many as came, to where they came from."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: ExpertParallelGroup, sent: list[int], came: list[int]) -> Tensor:
        ctx.ranks, ctx.sent, ctx.came = ranks, sent, came
        back, work = ranks.start_all_to_all(rows, sent, came)
        ranks.wait(work)
        return back

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        back, work = ctx.ranks.start_all_to_all(gradient, ctx.came, ctx.sent)
        ctx.ranks.wait(work)
        return back, None, None, None
