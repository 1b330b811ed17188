"""Check that a layout can run a model on a number of ranks."""

from __future__ import annotations

from phalanx.program.pipeline_split import layers_per_rank, layers_per_stage
from phalanx.schedule.registry import layout_schedule
from phalanx.spec.base import require
from phalanx.spec.batch import BatchPlan
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import plural
from phalanx.spec.layout import FSDP_STRATEGIES, check_supported
from phalanx.spec.pipeline_schedules import SCHEDULES, V_SCHEDULES, quote_names
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.spec.tensor_sharding import check_divisibility


def require_resolved_layout(run: RunSpec) -> None:
    """Raise UserError if the run's layout or its recomputation is "auto" and not yet chosen."""
    require_planned_layout(run)
    require(
        not run.layout.auto_checkpointing,
        "layout.activation_checkpointing",
        "auto",
        problem="is chosen by the planner, which this command does not run",
        fix="set the value that `phalanx train RUN.toml --print-config` prints",
    )


def require_planned_layout(run: RunSpec) -> None:
    """Raise UserError if the run's layout is "auto" and not yet chosen."""
    require(
        not run.auto_layout,
        "layout",
        "auto",
        problem="is chosen by the planner, which this command does not run",
        fix="use phalanx train, or save a layout with phalanx plan RUN.toml --out FILE",
    )


def assume_no_recomputation(run: RunSpec) -> RunSpec:
    """Return the run without recomputation if it is "auto", for results that do not depend on it."""
    return run.model_copy(update={"layout": run.layout.model_copy(update={"auto_checkpointing": False})})


def check_layout(resolved: ResolvedRun) -> None:
    """Raise UserError if `world_size` ranks cannot run the layout with this model and batch size."""
    run = resolved.run
    require_resolved_layout(run)
    check_supported(run.layout)
    batch = resolved.batch
    check_divisibility(resolved)
    if run.layout.pp > 1:
        _check_pipeline(run, batch)
    _check_recomputed_blocks(run)


def _check_recomputed_blocks(run: RunSpec) -> None:
    """Raise UserError if more blocks recompute activations than a rank has."""
    counts = run.layout.recomputed_blocks
    if counts is None:
        return
    blocks = [len(layers) for layers in layers_per_rank(run)]
    for count, limit in zip(counts, blocks, strict=True) if isinstance(counts, tuple) else [(counts, max(blocks))]:
        if count > limit:
            rank = "a pipeline rank" if run.layout.pp > 1 else "the model"
            fix = f"use at most {limit}"
            raise UserError(
                "layout.recomputed_blocks", counts, f"exceeds the {plural(limit, 'block')} of {rank}", fix=fix
            )


def _check_pipeline(run: RunSpec, batch: BatchPlan) -> None:
    """Raise UserError if a pipeline cannot run this model, or its schedule this number of micro-batches."""
    layout = run.layout
    micro_batches = batch.gradient_accumulation_steps
    layers_per_stage(run)
    try:
        schedule = layout_schedule(layout, micro_batches)
    except UserError as error:
        if layout.schedule_file is not None:
            raise
        problem = f"cannot run a step of {micro_batches} micro-batches: the number {error.problem}"
        fix = "change layout.micro_batch_size or training.tokens_per_step"
        raise UserError("layout.schedule", layout.schedule, problem, fix=fix) from None
    supports_uneven = layout.schedule_file is None and SCHEDULES[layout.schedule].supports_uneven_micro_batches
    if not supports_uneven and not batch.has_equal_micro_batches:
        name = layout.schedule_file or layout.schedule
        raise UserError(
            "training.tokens_per_step",
            run.training.tokens_per_step,
            f'results in different numbers of micro-batches per rank, which schedule "{name}" does not support',
            fix="use a multiple of layout.micro_batch_size x data-parallel ranks x training.seq_len",
        )
    first, last = schedule.end_ranks
    if run.model.tie_embeddings and first != last and layout.data_parallel in FSDP_STRATEGIES:
        raise UserError(
            "model.tie_embeddings",
            True,
            f'requires embedding and head on one rank with layout.data_parallel = "{layout.data_parallel}"',
            fix=f"use layout.schedule = {quote_names(V_SCHEDULES)}, which have both on one rank, or "
            'layout.data_parallel = "zero1"',
        )
