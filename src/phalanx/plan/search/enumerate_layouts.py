"""All layouts that a run can have on a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from phalanx.cost.estimate.pipeline_schedules import SCHEDULE_ESTIMATES
from phalanx.cost.exact.layout_checks import check_divisibility
from phalanx.cost.formulas.collectives import Strategy
from phalanx.plan.search.candidates import CandidateLayout, check_precision
from phalanx.spec.base import divisors
from phalanx.spec.errors import UserError
from phalanx.spec.layout import VALID_DATA_STRATEGIES, CheckpointingName, CpMethod, Layout, OffloadName, RankOrder
from phalanx.spec.pipeline_schedules import ScheduleName
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec

ENUMERATED_METHODS: tuple[CheckpointingName, ...] = ("none", "selective", "full")
"""Methods of recomputation of all layouts."""
MAX_MICRO_BATCH = 32


class _Degrees(NamedTuple):
    """Degrees of parallelism. dp x tp x pp x cp is the number of ranks; expert parallelism is within a stage."""

    dp: int
    tp: int
    pp: int
    cp: int
    cp_method: CpMethod
    ep: int


def enumerate_layouts(resolved: ResolvedRun) -> list[CandidateLayout]:
    """Return all layouts among which the planner chooses, without offload.

    Not included are options that are never best on equal ranks: parameter servers, and tensor parallelism without
    sequence parallelism if the sequence divides. In pipelines, ZeRO-2 and 3 are not included, because there they store
    and send at least as much as ZeRO-1. Raises UserError if the precision is unknown."""
    run = resolved.run
    check_precision(run)
    domain = run.cluster.fast_link_domain_size
    return [
        CandidateLayout(
            data_parallel=data_parallel,
            dp=degrees.dp,
            dp_shard=dp_shard,
            tp=degrees.tp,
            pp=degrees.pp,
            cp=degrees.cp,
            cp_method=degrees.cp_method,
            ep=degrees.ep,
            micro_batch_size=micro_batch_size,
            micro_batches=micro_batches,
            activation_checkpointing=activation_checkpointing,
            schedule=schedule,
            virtual_stages=virtual_stages,
            rank_order=rank_order,
        )
        for degrees in _enumerate_degrees(resolved)
        for rank_order in [choose_rank_order(degrees.dp, degrees.tp, degrees.pp, degrees.cp, domain)]
        for data_parallel, dp_shard in _enumerate_data_parallel(degrees, domain)
        for micro_batch_size, micro_batches in _enumerate_micro_batches(run, degrees.dp)
        for schedule, virtual_stages in _list_schedules(degrees.pp, micro_batches, run.model.num_layers)
        for activation_checkpointing in ENUMERATED_METHODS
    ]


def smaller_variants(run: RunSpec, candidate: CandidateLayout) -> Iterator[CandidateLayout]:
    """Yield the variants of a layout for less device memory: with recomputed norms, and with offload.

    Norms are recomputed in layouts that recompute nothing else. State is offloaded to CPU memory unless ranks compute
    on CPUs, and to files if the run names a directory. Only sharded state is offloaded, or that of a single rank, which
    then trains with ZeRO-1 or 2. Layouts with full recomputation also have variants that offload the inputs of blocks,
    with and without the state. A variant uses less device memory and, with the same strategy, never less time.
    """
    if candidate.offloads or candidate.activation_checkpointing == "norms":
        return
    if candidate.activation_checkpointing == "none":
        yield candidate._replace(activation_checkpointing="norms")
    yield from _enumerate_state_offload(run, candidate)
    if candidate.activation_checkpointing == "full" and not run.cluster.uses_cpu:
        without_inputs = candidate._replace(activation_checkpointing="offload")
        yield without_inputs
        yield from _enumerate_state_offload(run, without_inputs)


def _enumerate_state_offload(run: RunSpec, candidate: CandidateLayout) -> Iterator[CandidateLayout]:
    has_single_copy = candidate.data_parallel == "ddp" and candidate.dp * candidate.cp == 1
    strategies: tuple[Strategy, ...] = ("zero1", "zero2") if candidate.pp == 1 else ("zero1",)
    targets: dict[OffloadName, str | None] = {"cpu": None} if not run.cluster.uses_cpu else {}
    if run.layout.offload_directory is not None:
        targets["nvme"] = run.layout.offload_directory
    for data_parallel in strategies if has_single_copy else (candidate.data_parallel,):
        if data_parallel not in VALID_DATA_STRATEGIES["offload"]:
            continue
        for target, directory in targets.items():
            yield candidate._replace(data_parallel=data_parallel, offload=target, offload_directory=directory)


def _enumerate_degrees(resolved: ResolvedRun) -> Iterator[_Degrees]:
    """Yield all degrees that divide the ranks, the batch and the model."""
    run = resolved.run
    sequences = run.training.tokens_per_step // run.training.seq_len
    num_experts = run.model.moe.num_experts if run.model.moe else 1
    for tp in divisors(resolved.world_size):
        for pp in divisors(resolved.world_size // tp):
            if pp > run.model.num_layers:
                continue
            for cp in divisors(resolved.world_size // tp // pp):
                dp = resolved.world_size // (tp * pp * cp)
                if sequences % dp > 0:
                    continue
                for ep in divisors(dp * cp * tp):
                    if num_experts % ep > 0:
                        continue
                    for cp_method in _enumerate_cp_methods(resolved, tp, pp, cp, ep):
                        yield _Degrees(dp, tp, pp, cp, cp_method, ep)


def _enumerate_cp_methods(resolved: ResolvedRun, tp: int, pp: int, cp: int, ep: int) -> Iterator[CpMethod]:
    """Yield the methods of context parallelism with which these degrees can share the model: on CPUs only the ring."""
    methods: tuple[CpMethod, ...] = ("ring", "ulysses")
    for cp_method in methods if cp > 1 and not resolved.run.cluster.uses_cpu else methods[:1]:
        layout = Layout(data_parallel="zero1", tp=tp, pp=pp, cp=cp, cp_method=cp_method, ep=ep, micro_batch_size=1)
        try:
            check_divisibility(resolved.with_layout(layout))
        except UserError:
            continue
        yield cp_method


def _enumerate_data_parallel(degrees: _Degrees, domain: int) -> Iterator[tuple[Strategy, int]]:
    """Yield data-parallel strategies with the ranks that share a copy; with hsdp, those of a domain."""
    yield "ddp", 1
    if degrees.dp * degrees.cp == 1:
        return
    yield "zero1", degrees.dp
    if degrees.pp > 1:
        return
    yield "zero2", degrees.dp
    yield "zero3", degrees.dp
    dp_in_domain = domain // (degrees.tp * degrees.cp)
    if 1 < dp_in_domain < degrees.dp and degrees.dp % dp_in_domain == 0:
        yield "hsdp", dp_in_domain


def choose_rank_order(dp: int, tp: int, pp: int, cp: int, domain: int) -> RankOrder:
    """Return the rank order: stages outermost if several ranks of a stage could share a domain of fast links.

    Data-parallel ranks and experts send much more than stages, and those of a domain send it together.
    """
    return "pipeline_outer" if dp > 1 and pp > 1 and dp * pp * tp * cp > domain > tp * cp else "data_outer"


def _enumerate_micro_batches(run: RunSpec, dp: int) -> Iterator[tuple[int, int]]:
    """Yield the micro-batch size and the number of micro-batches per rank and step."""
    sequences_per_rank = run.training.tokens_per_step // run.training.seq_len // dp
    for micro_batch_size in divisors(sequences_per_rank):
        if micro_batch_size <= MAX_MICRO_BATCH:
            yield micro_batch_size, sequences_per_rank // micro_batch_size


@lru_cache(maxsize=2**12)
def _list_schedules(pp: int, micro_batches: int, layers: int) -> list[tuple[ScheduleName, int]]:
    """Return the schedules that a pipeline of `pp` ranks can have, with the virtual stages."""
    return [
        (name, stages)
        for name, estimate in SCHEDULE_ESTIMATES.items()
        if pp > 1 or name == "1f1b"
        for stages in estimate.searched_stages(pp, micro_batches, layers)
    ]
