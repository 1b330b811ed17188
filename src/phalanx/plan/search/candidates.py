"""All layouts that a run can have on a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from phalanx.cost.exact.rank_state import effective_strategy
from phalanx.cost.formulas.collectives import Strategy
from phalanx.cost.kinds import PHALANX_CHECKPOINTING, ScheduleKind
from phalanx.spec.base import divisors, require
from phalanx.spec.batch import plan_batch
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.errors import UserError
from phalanx.spec.layout import SHARDED_STRATEGIES, VALID_DATA_STRATEGIES, Layout, RankOrder
from phalanx.spec.parallel_dims import parallel_dims
from phalanx.spec.run import RunSpec
from phalanx.spec.tensor_sharding import check_divisibility

ZERO_STAGES: dict[Strategy, int] = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "hsdp": 3}
IGNORED_FIELDS = {
    "data_parallel",
    "dp_shard",
    "micro_batch_size",
    "bucket_mb",
    "first_bucket_mb",
    "powersgd_rank",
    "ddp_static_graph",
    "ddp_find_unused_parameters",
    "fsdp_prefetch",
    "num_servers",
    "max_staleness",
}
"""Fields of a layout that a candidate represents differently, or that do not affect the prediction."""
NOT_PREDICTED = "is not supported by the planner"
MAX_MICRO_BATCH = 32
MAX_VIRTUAL_STAGES = 8


@dataclass(frozen=True)
class CandidateLayout:
    """Choices of one layout, as numbers and names."""

    data_parallel: Strategy
    dp: int
    dp_shard: int
    tp: int
    pp: int
    cp: int
    cp_method: str
    """Attention of context-parallel ranks: ring or ulysses."""
    ep: int
    micro_batch_size: int
    micro_batches: int
    activation_checkpointing: str
    schedule: str
    virtual_stages: int
    rank_order: RankOrder = "data_outer"
    offload: str = "none"
    offload_directory: str | None = None

    @property
    def num_parallel_axes(self) -> int:
        """Number of kinds of parallelism: the fewer, the simpler."""
        return sum(degree > 1 for degree in (self.dp, self.tp, self.pp, self.cp, self.ep)) + (
            self.data_parallel == "hsdp"
        )

    def __str__(self) -> str:
        degrees = [f"{axis} {getattr(self, axis)}" for axis in ("tp", "cp", "ep") if getattr(self, axis) > 1]
        degrees = [f"{degree} {self.cp_method}" if degree.startswith("cp") else degree for degree in degrees]
        chunks = f" x {self.virtual_stages}" if self.virtual_stages > 1 else ""
        order = " (outer)" if self.rank_order == "pipeline_outer" else ""
        pipeline = [f"pp {self.pp}{order} {self.schedule}{chunks}"] if self.pp > 1 else []
        shard = f" of {self.dp_shard}" if self.data_parallel == "hsdp" else ""
        checkpointing = (
            [] if self.activation_checkpointing == "none" else [f"recompute {self.activation_checkpointing}"]
        )
        batch = f"micro-batch {self.micro_batch_size} x {self.micro_batches}"
        offload = [] if self.offload == "none" else [f"offload {self.offload}"]
        return ", ".join(
            [f"{self.data_parallel}{shard} dp {self.dp}", *degrees, *pipeline, batch, *checkpointing, *offload]
        )

    def layout(self) -> Layout:
        """Return the layout as a run file contains it."""
        piped = {name: getattr(self, name) for name in ("schedule", "virtual_stages", "rank_order") if self.pp > 1}
        shard = {"dp_shard": self.dp_shard} if self.data_parallel == "hsdp" else {}
        sequences = {"cp_method": self.cp_method} if self.cp > 1 else {}
        offload = {"offload": self.offload, "offload_directory": self.offload_directory}
        return Layout.model_validate(
            {
                "data_parallel": self.data_parallel,
                "tp": self.tp,
                "pp": self.pp,
                "cp": self.cp,
                "ep": self.ep,
                "micro_batch_size": self.micro_batch_size,
                "activation_checkpointing": self.activation_checkpointing,
                **piped,
                **shard,
                **sequences,
                **offload,
            }
        )


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


def candidate_from_run(run: RunSpec, world_size: int) -> CandidateLayout:
    """Return the run's own layout, with its effective strategy.

    Raises UserError if the layout cannot run, or the planner does not support it."""
    check_precision(run)
    layout = run.layout
    sizes = parallel_dims(run.layout, world_size)
    batch = plan_batch(run, world_size)
    known = layout.data_parallel in ZERO_STAGES and layout.schedule_file is None and layout.schedule in SCHEDULE_KINDS
    value = layout.data_parallel if layout.data_parallel not in ZERO_STAGES else layout.schedule_file or layout.schedule
    require(
        known, "layout", value, problem=NOT_PREDICTED, fix=f"use one of {', '.join((*ZERO_STAGES, *SCHEDULE_KINDS))}"
    )
    data = effective_strategy(
        layout, sizes.with_cp_as_data_parallel(sharded=layout.data_parallel in SHARDED_STRATEGIES).dp_shard
    )
    keeps_parameters = layout.pp == 1 or ZERO_STAGES[data] < 3
    require(
        keeps_parameters,
        "layout.data_parallel",
        data,
        problem=f"{NOT_PREDICTED} in a pipeline",
        fix='use layout.data_parallel = "zero1", or layout.pp = 1',
    )
    candidate = CandidateLayout(
        data,
        sizes.dp_size,
        sizes.dp_shard,
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        cp_method=layout.cp_method,
        ep=layout.ep,
        micro_batch_size=batch.micro_batch_size,
        micro_batches=batch.gradient_accumulation_steps,
        activation_checkpointing=layout.activation_checkpointing,
        schedule=layout.schedule,
        virtual_stages=layout.virtual_stages,
        rank_order=layout.rank_order,
        offload=layout.offload,
        offload_directory=layout.offload_directory,
    )
    check_representable(layout, candidate)
    return candidate


def check_representable(layout: Layout, candidate: CandidateLayout) -> None:
    """Raise UserError for an option that affects the cost and that a candidate cannot represent."""
    planned = candidate.layout()
    for field in sorted(Layout.model_fields.keys() - IGNORED_FIELDS):
        value = getattr(layout, field)
        only = getattr(planned, field)
        require(
            value == only,
            f"layout.{field}",
            value,
            problem=NOT_PREDICTED,
            fix=f"use {json.dumps(only)}, the only supported value",
        )


def check_precision(run: RunSpec) -> None:
    """Raise UserError for a precision that the planner cannot predict."""
    precision = run.training.precision
    known = known_precisions(run.cluster)
    # Nothing is known about an unnamed machine, but fp32 is known on a CPU.
    machine = "set the machine (--machine cpu, or cluster.preset), " if run.cluster.preset is None else ""
    require(
        precision in known,
        "training.precision",
        precision,
        problem=f"{NOT_PREDICTED} on this machine",
        fix=f'{machine}set training.precision = "{known[0]}", or calibrate with runs in {precision} (`phalanx '
        f"calibrate`)",
    )


def known_precisions(cluster: ClusterSpec) -> tuple[str, ...]:
    """Return the precisions that can be predicted on a cluster.

    They are that of the calibration runs; else bf16, as in published runs, and on a CPU also fp32, which it multiplies
    at its peak (see `describe_assumptions`)."""
    if cluster.calibration is not None:
        return (cluster.calibration.precision,)
    return ("bf16", "fp32") if cluster.uses_cpu else ("bf16",)


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
    kinds = ("ulysses", "ring") if cp > 1 and not run.cluster.uses_cpu else ("ring",)
    for context in kinds:
        layout = Layout.model_validate(
            {
                "data_parallel": "zero1",
                "tp": tp,
                "pp": pp,
                "cp": cp,
                "cp_method": context,
                "ep": ep,
                "micro_batch_size": 1,
            }
        )
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

    Data-parallel ranks and experts send much more than stages, and those of a domain send it together. `domain` is the
    number of devices that fast links connect; the other arguments are degrees."""
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


SCHEDULE_KINDS: dict[str, ScheduleKind] = {
    "1f1b": ScheduleKind.ONE_F_ONE_B,
    "gpipe": ScheduleKind.GPIPE,
    "interleaved": ScheduleKind.INTERLEAVED,
    "zb-h1": ScheduleKind.ZB_H1,
    "zb-h2": ScheduleKind.ZB_H2,
    "zb-v": ScheduleKind.ZB_V,
}
"""Schedules that the planner can predict; naive and dualpipe-v are never faster than all of them."""
