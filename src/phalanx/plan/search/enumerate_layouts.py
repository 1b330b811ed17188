"""All layouts that a run can have on a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from phalanx.cost.formulas.collectives import Strategy
from phalanx.cost.kinds import PHALANX_CHECKPOINTING
from phalanx.plan.search.candidates import CandidateLayout, check_precision
from phalanx.spec.base import divisors
from phalanx.spec.errors import UserError
from phalanx.spec.layout import VALID_DATA_STRATEGIES, Layout, RankOrder
from phalanx.spec.run import RunSpec
from phalanx.spec.tensor_sharding import check_divisibility

MAX_MICRO_BATCH = 32
MAX_VIRTUAL_STAGES = 8


def enumerate_layouts(run: RunSpec, world_size: int) -> list[CandidateLayout]:
    """Return all layouts among which the planner chooses, without offload.

    Not included are options that are never best on equal ranks: parameter servers, and tensor parallelism without
    sequence parallelism if the sequence divides. In pipelines, ZeRO-2 and 3 are not included, because there they store
    and send at least as much as ZeRO-1. Raises UserError if the precision is unknown."""
    check_precision(run)
    domain = run.cluster.fast_link_domain_size
    return [
        CandidateLayout(
            data,
            dp,
            shard,
            tp=tp,
            pp=pp,
            cp=cp,
            cp_method=context,
            ep=ep,
            micro_batch_size=micro_batch,
            micro_batches=m,
            activation_checkpointing=checkpointing,
            schedule=schedule,
            virtual_stages=v,
            rank_order=rank_order,
        )
        for tp, pp, cp, context, ep, dp in _enumerate_degrees(run, world_size)
        for rank_order in (choose_rank_order(dp, tp, pp, cp=cp, domain=domain),)
        for data, shard in _data_parallel_options(dp, tp, pp, cp=cp, domain=domain)
        for micro_batch, m in _micro_batch_options(run, dp)
        for schedule, v in _schedule_options(pp, m, run.model.num_layers, halves=not run.training.compile)
        for checkpointing in PHALANX_CHECKPOINTING
    ]


def offload_variants(run: RunSpec, candidate: CandidateLayout) -> Iterator[CandidateLayout]:
    """Yield offload variants of a layout: state in CPU memory, or in files if the run names a directory.

    CPU memory is not a variant if ranks compute on CPUs. The state is that which ranks shard, or that of a single rank,
    which offloads as with ZeRO-1 or 2. A variant uses less device memory and, with the same strategy, never less time.
    """
    if candidate.offload != "none":
        return
    alone = candidate.data_parallel == "ddp" and candidate.dp * candidate.cp == 1
    strategies: tuple[Strategy, ...] = ("zero1", "zero2") if candidate.pp == 1 else ("zero1",)
    targets: dict[str, str | None] = {"cpu": None} if not run.cluster.uses_cpu else {}
    if run.layout.offload_directory is not None:
        targets["nvme"] = run.layout.offload_directory
    for data in strategies if alone else (candidate.data_parallel,):
        for target, directory in targets.items() if data in VALID_DATA_STRATEGIES["offload"] else ():
            yield replace(candidate, data_parallel=data, offload=target, offload_directory=directory)


def _enumerate_degrees(run: RunSpec, world_size: int) -> Iterator[tuple[int, int, int, str, int, int]]:
    """Yield tp, pp, cp, cp_method, ep and dp of all degrees that divide the ranks and the model."""
    sequences = run.training.tokens_per_step // run.training.seq_len
    experts = run.model.moe.num_experts if run.model.moe else 1
    for tp in divisors(world_size):
        for pp in (p for p in divisors(world_size // tp) if p <= run.model.num_layers):
            for cp in divisors(world_size // tp // pp):
                dp = world_size // (tp * pp * cp)
                if sequences % dp == 0:
                    for ep in (e for e in divisors(dp * cp * tp) if experts % e == 0):
                        context = _choose_cp_method(run, world_size, tp, pp=pp, cp=cp, ep=ep)
                        if context:
                            yield tp, pp, cp, context, ep, dp


def _choose_cp_method(run: RunSpec, world_size: int, tp: int, pp: int, cp: int, ep: int) -> str:
    """Return the method of context parallelism, or "" if these degrees cannot share the model.

    On a GPU, ranks exchange tokens for heads if there are enough heads, because the ring has no flash kernel there."""
    methods: list[Literal["ulysses", "ring"]] = ["ulysses", "ring"]
    for context in methods if cp > 1 and not run.cluster.uses_cpu else methods[1:]:
        layout = Layout(data_parallel="zero1", tp=tp, pp=pp, cp=cp, cp_method=context, ep=ep, micro_batch_size=1)
        try:
            check_divisibility(run.model_copy(update={"layout": layout}), world_size)
        except UserError:
            continue
        return context
    return ""


def _data_parallel_options(dp: int, tp: int, pp: int, cp: int, domain: int) -> Iterator[tuple[Strategy, int]]:
    """Yield data-parallel strategies with the ranks that share a copy; with hsdp, those of a domain."""
    yield "ddp", 1
    if dp * cp > 1:
        yield "zero1", dp
    if dp * cp > 1 and pp == 1:
        yield "zero2", dp
        yield "zero3", dp
        near = domain // (tp * cp)
        if 1 < near < dp and dp % near == 0:
            yield "hsdp", near


def choose_rank_order(dp: int, tp: int, pp: int, cp: int, domain: int) -> RankOrder:
    """Return the rank order: stages outermost if several ranks of a stage could share a domain.

    Data-parallel ranks and experts send much more than stages, and those of a domain send it together.

    Args:
        dp: Degree of data parallelism.
        tp: Degree of tensor parallelism.
        pp: Degree of pipeline parallelism.
        cp: Degree of context parallelism.
        domain: Number of devices that fast links connect.
    """
    return "pipeline_outer" if dp > 1 and pp > 1 and dp * pp * tp * cp > domain > tp * cp else "data_outer"


def _micro_batch_options(run: RunSpec, dp: int) -> Iterator[tuple[int, int]]:
    """Yield the micro-batch size and the number of micro-batches per rank and step."""
    share = run.training.tokens_per_step // run.training.seq_len // dp
    for micro_batch in divisors(share):
        if micro_batch <= MAX_MICRO_BATCH:
            yield micro_batch, share // micro_batch


def _schedule_options(pp: int, m: int, layers: int, halves: bool) -> Iterator[tuple[str, int]]:
    """Yield the schedules that a pipeline of `pp` stages can have, with the virtual stages.

    Compiled blocks cannot split their backward passes, and too few micro-batches cannot fill bubbles."""
    yield "1f1b", 1
    if pp == 1:
        return
    if halves and m >= pp:
        yield "zb-h1", 1
        if m >= 2 * pp - 1:
            yield "zb-h2", 1
            if layers >= 2 * pp:
                yield "zb-v", 1
    if m % pp == 0:
        for v in range(2, min(layers // pp, MAX_VIRTUAL_STAGES) + 1):
            yield "interleaved", v
