"""A layout as the planner has it: numbers and names, from and to the layout of a run file."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from phalanx.cost.estimate.pipeline_schedules import SCHEDULE_ESTIMATES
from phalanx.cost.formulas.collectives import Strategy
from phalanx.spec.base import require
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.layout import (
    REQUIRES_DEGREE,
    CheckpointingName,
    CpMethod,
    Layout,
    OffloadName,
    RankOrder,
    describe_recomputation,
)
from phalanx.spec.parallel_dims import strategy_on_ranks
from phalanx.spec.pipeline_schedules import ScheduleName
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec

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


class CandidateLayout(NamedTuple):
    """The choices of a `Layout` that a search makes, and their consequences for a number of ranks: dp, micro-batches.

    A search makes hundreds of thousands, so it is a tuple.
    """

    data_parallel: Strategy
    dp: int
    dp_shard: int
    tp: int
    pp: int
    cp: int
    cp_method: CpMethod
    ep: int
    micro_batch_size: int
    micro_batches: int
    activation_checkpointing: CheckpointingName
    schedule: ScheduleName
    virtual_stages: int
    rank_order: RankOrder = "data_outer"
    offload: OffloadName = "none"
    offload_directory: str | None = None
    recomputed_blocks: int | tuple[int, ...] | None = None

    @property
    def offloads(self) -> bool:
        """True if state or activations are off the device."""
        return self.offload != "none" or self.activation_checkpointing == "offload"

    @property
    def num_parallel_axes(self) -> int:
        """Number of kinds of parallelism: the fewer, the simpler."""
        axes = (self.dp > 1) + (self.tp > 1) + (self.pp > 1) + (self.cp > 1) + (self.ep > 1)
        return axes + (self.data_parallel == "hsdp")

    def __str__(self) -> str:
        degrees = [f"{axis} {getattr(self, axis)}" for axis in ("tp", "cp", "ep") if getattr(self, axis) > 1]
        degrees = [f"{degree} {self.cp_method}" if degree.startswith("cp") else degree for degree in degrees]
        chunks = f" x {self.virtual_stages}" if self.virtual_stages > 1 else ""
        order = " (outer)" if self.rank_order == "pipeline_outer" else ""
        pipeline = [f"pp {self.pp}{order} {self.schedule}{chunks}"] if self.pp > 1 else []
        shard = f" of {self.dp_shard}" if self.data_parallel == "hsdp" else ""
        checkpointing = [] if self.activation_checkpointing == "none" else [describe_recomputation(self.layout())]
        batch = f"micro-batch {self.micro_batch_size} x {self.micro_batches}"
        offload = [] if self.offload == "none" else [f"offload {self.offload}"]
        return ", ".join(
            [f"{self.data_parallel}{shard} dp {self.dp}", *degrees, *pipeline, batch, *checkpointing, *offload]
        )

    def layout(self) -> Layout:
        """Return the layout as a run file contains it, without the options that its degrees do not have."""
        fields = {
            name: getattr(self, name)
            for name in LAYOUT_FIELDS
            if name not in REQUIRES_DEGREE or getattr(self, REQUIRES_DEGREE[name]) > 1
        }
        if self.data_parallel != "hsdp":
            del fields["dp_shard"]
        return Layout.model_validate(fields)


LAYOUT_FIELDS = [name for name in CandidateLayout._fields if name in Layout.model_fields]


def candidate_from_run(resolved: ResolvedRun) -> CandidateLayout:
    """Return the run's own layout, with its effective strategy.

    Raises UserError if the layout cannot run, or has an option that affects the cost and that the planner does not
    support.
    """
    check_precision(resolved.run)
    layout = resolved.layout
    knows_strategy = layout.data_parallel in ZERO_STAGES
    require(
        knows_strategy and layout.schedule_file is None and layout.schedule in SCHEDULE_ESTIMATES,
        "layout",
        layout.schedule_file or layout.schedule if knows_strategy else layout.data_parallel,
        problem=NOT_PREDICTED,
        fix=f"use one of {', '.join((*ZERO_STAGES, *SCHEDULE_ESTIMATES))}",
    )
    data_parallel = strategy_on_ranks(layout, resolved.data_dims.dp_shard)
    require(
        layout.pp == 1 or ZERO_STAGES[data_parallel] < 3,
        "layout.data_parallel",
        data_parallel,
        problem=f"{NOT_PREDICTED} in a pipeline",
        fix='use layout.data_parallel = "zero1", or layout.pp = 1',
    )
    choices: dict[str, Any] = {name: getattr(layout, name) for name in LAYOUT_FIELDS} | {
        "data_parallel": data_parallel,
        "dp": resolved.dims.dp_size,
        "dp_shard": resolved.dims.dp_shard,
        "micro_batch_size": resolved.batch.micro_batch_size,
        "micro_batches": resolved.micro_batches,
    }
    candidate = CandidateLayout(**choices)
    predicted = candidate.layout()
    for field in sorted(Layout.model_fields.keys() - IGNORED_FIELDS):
        value = getattr(layout, field)
        supported_value = getattr(predicted, field)
        fix = f"use {json.dumps(supported_value)}, the only supported value"
        require(value == supported_value, f"layout.{field}", value, problem=NOT_PREDICTED, fix=fix)
    return candidate


def describe_other_strategy(layout: Layout, candidate: CandidateLayout) -> str | None:
    """Return why a layout has another strategy on its ranks than it names (`strategy_on_ranks`); None if it has not."""
    used = candidate.data_parallel
    if layout.data_parallel == used:
        return None
    condition = "on one shard"
    reason = "there is nothing to share"
    if used == "zero1":
        condition = "in a pipeline"
        reason = "full gradients stay until the last micro-batch"
    return f"data_parallel = {layout.data_parallel} {condition} trains as {used}, which is evaluated here: {reason}"


def check_precision(run: RunSpec) -> None:
    """Raise UserError for a precision that the planner cannot predict."""
    precision = run.training.precision
    precisions = known_precisions(run.cluster)
    # Nothing is known about an unnamed machine, but fp32 is known on a CPU.
    machine = "set the machine (--machine cpu, or cluster.preset), " if run.cluster.preset is None else ""
    calibrate = f"calibrate with runs in {precision} (`phalanx calibrate`)"
    if precision == "fp8" and run.cluster.calibration is not None:
        machine = ""
        calibrate = "plan for GPUs with cluster.matmul_flops_8bit and without cluster.calibration, which excludes fp8"
    elif precision == "fp8":
        calibrate = "plan for GPUs with cluster.matmul_flops_8bit, such as --machine h100"
    problem = f"{NOT_PREDICTED} on this machine"
    option = f"--set training.precision={precisions[0]}"
    fix = f'{machine}set training.precision = "{precisions[0]}" ({option}), or {calibrate}'
    require(precision in precisions, "training.precision", precision, problem, fix)


def known_precisions(cluster: ClusterSpec) -> tuple[str, ...]:
    """Return the precisions that can be predicted on a cluster.

    They are that of the calibration runs; else bf16, as in published runs, on a CPU also fp32, which it multiplies at
    its peak (see `describe_assumptions`), and on GPUs with a known 8-bit speed fp8."""
    if cluster.calibration is not None:
        return (cluster.calibration.precision,)
    if cluster.uses_cpu:
        return "bf16", "fp32"
    return ("bf16", "fp8") if cluster.uses_cuda and cluster.matmul_flops_8bit is not None else ("bf16",)
