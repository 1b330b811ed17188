"""Evaluation of layouts: step time, memory, and the probability of running out of memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from phalanx.cost.estimate.memory import StageMemoryTable, estimate_memory, oom_probability
from phalanx.cost.estimate.step_time import PARTS, StepTime, step_seconds
from phalanx.cost.exact.flops import mfu, recomputed_flops_per_token, training_flops_per_token
from phalanx.cost.exact.layout_checks import check_layout
from phalanx.cost.exact.rank_memory import rank_memory
from phalanx.cost.kinds import PHALANX_CHECKPOINTING, Column
from phalanx.plan.search.candidate_columns import candidate_jobs
from phalanx.plan.search.candidates import CandidateLayout, candidate_from_run
from phalanx.plan.search.oom_risk import device_and_host_bytes, layout_oom_probability, process_bytes
from phalanx.plan.search.result import EvaluatedLayout
from phalanx.plan.tables.job_columns import interval_half_width, memory_constants_for, time_constants_for
from phalanx.spec.base import parse_table
from phalanx.spec.errors import UserError
from phalanx.spec.files.tables import parse_toml_value
from phalanx.spec.layout import Layout
from phalanx.spec.run import RunSpec


def parse_layout(text: str) -> Layout:
    """Return the layout in a user's text: "tp=4, pp=8, data_parallel=zero1".

    Raises:
        UserError: If a key is not a field of `Layout`.
    """
    table: dict[str, object] = {}
    for item in filter(None, (part.strip() for part in text.replace("layout.", "").split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise UserError(
                "layout",
                item,
                "is not of the form KEY=VALUE",
                fix='write, for example, "tp=4,pp=8,data_parallel=zero1"',
            )
        table[key] = parse_toml_value(value)
    return parse_table(Layout, table, "layout")


def layout_to_text(layout: Layout) -> str:
    """Return a layout as text that `parse_layout` reads."""
    return ",".join(f"{name}={value}" for name, value in layout.model_dump(exclude_defaults=True).items())


def evaluate_layout(run: RunSpec, world_size: int, layout: Layout) -> EvaluatedLayout:
    """Return the predicted cost of a given layout.

    Args:
        run: The run.
        world_size: Number of ranks.
        layout: Layout to evaluate instead of the run's.

    Raises:
        UserError: If the layout cannot run, or the planner does not support it.
    """
    layout_run = run.model_copy(update={"layout": layout})
    check_layout(layout_run, world_size)
    return with_exact_memory(
        run, world_size, evaluate(layout_run, world_size, [candidate_from_run(layout_run, world_size)])[0]
    )


def oom_probabilities(run: RunSpec, world_size: int, layouts: list[CandidateLayout]) -> Column:
    """Return the estimated probability that memory is insufficient, per layout.

    Args:
        run: The run.
        world_size: Number of ranks.
        layouts: Candidate layouts.
    """
    jobs = candidate_jobs(run, world_size, layouts)
    c = memory_constants_for(run.cluster)
    return np.broadcast_to(oom_probability(c, jobs, estimate_memory(c, jobs)), len(layouts))


def can_run(run: RunSpec, world_size: int, candidate: CandidateLayout) -> bool:
    """Return whether Phalanx can train a layout.

    Args:
        run: The run.
        world_size: Number of ranks.
        candidate: Candidate layout.
    """
    try:
        check_layout(run.model_copy(update={"layout": candidate.layout()}), world_size)
    except UserError:
        return False
    return True


def with_exact_memory(run: RunSpec, world_size: int, option: EvaluatedLayout) -> EvaluatedLayout:
    """Return an option with Phalanx's exact memory, as `phalanx memory` counts it.

    The exact count can exceed the estimate, which is for any trainer.

    Args:
        run: The run.
        world_size: Number of ranks.
        option: Evaluated layout.
    """
    layout_run = run.model_copy(update={"layout": option.candidate.layout()})
    cluster = run.cluster
    memories = list(rank_memory(layout_run, world_size).values())
    device_bytes, host_bytes = device_and_host_bytes(cluster, memories)
    used, *stage_bytes = (
        process_bytes(cluster, size) if cluster.calibration else size
        for size in (device_bytes, *(device_and_host_bytes(cluster, [memories[index]])[0] for index in (0, -1)))
    )
    stages = dict(zip(("first", "last"), stage_bytes, strict=True))
    risk = max(option.p_oom, layout_oom_probability(cluster, device_bytes, host_bytes))
    return replace(option, memory_bytes=used, host_bytes=host_bytes, stage_bytes=stages, p_oom=risk)


@dataclass(frozen=True)
class LayoutPredictions:
    """Predictions of many layouts at once: a row each, in their order. Memory is a formula's estimate."""

    time: StepTime
    memory: StageMemoryTable
    interval_factor: Column
    """80 of 100 steps take between the predicted seconds divided by this factor, and multiplied by it."""
    p_oom: Column
    peak_flops: float
    """Peak FLOP/s of one rank's device."""


def predict_layouts(run: RunSpec, world_size: int, layouts: list[CandidateLayout]) -> LayoutPredictions:
    """Predict time and memory of some layouts, in columns that broadcast to their number.

    Args:
        run: Run with the model, the batch and the cluster.
        world_size: Number of ranks.
        layouts: Layouts to predict; at least one.
    """
    jobs = candidate_jobs(run, world_size, layouts)
    c = memory_constants_for(run.cluster)
    memory = estimate_memory(c, jobs)
    return LayoutPredictions(
        step_seconds(time_constants_for(run.cluster), jobs),
        memory,
        np.exp(interval_half_width(run.cluster, jobs)),
        p_oom=oom_probability(c, jobs, memory),
        peak_flops=float(jobs.peak_flops[0]),
    )


def evaluate(run: RunSpec, world_size: int, layouts: list[CandidateLayout]) -> list[EvaluatedLayout]:
    """Return the predicted cost of each layout, in their order.

    Args:
        run: The run.
        world_size: Number of ranks.
        layouts: Candidate layouts.
    """
    if not layouts:
        return []
    size = len(layouts)
    predictions = predict_layouts(run, world_size, layouts)
    time = predictions.time
    memory = predictions.memory
    tokens = run.training.tokens_per_step
    sequence = run.training.seq_len
    flops = training_flops_per_token(run.model, sequence)
    peak = predictions.peak_flops
    recomputed_flops = {
        name: recomputed_flops_per_token(run.model, sequence, kind) for name, kind in PHALANX_CHECKPOINTING.items()
    }

    def scalar_at(column: Column, index: int) -> float:
        return float(np.broadcast_to(column, size)[index])

    options = []
    for index, candidate in enumerate(layouts):
        seconds = scalar_at(time.total, index)
        stages = {
            name: {
                part: scalar_at(getattr(stage, part), index) for part in ("state", "activations", "logits", "buffers")
            }
            for name, stage in (("first", memory.first), ("last", memory.last))
        }
        speed = tokens / seconds
        options.append(
            EvaluatedLayout(
                candidate,
                seconds,
                seconds / scalar_at(predictions.interval_factor, index),
                high_seconds=seconds * scalar_at(predictions.interval_factor, index),
                parts={part: scalar_at(getattr(time, part), index) for part in PARTS},
                memory_bytes=scalar_at(memory.allocated, index),
                host_bytes=scalar_at(memory.host, index),
                stages=stages,
                stage_bytes={name: sum(parts.values()) for name, parts in stages.items()},
                p_oom=scalar_at(predictions.p_oom, index),
                tokens_per_second=speed,
                mfu=mfu(speed, flops, peak, ranks=world_size),
                hfu=mfu(speed, flops + recomputed_flops[candidate.activation_checkpointing], peak, ranks=world_size),
            )
        )
    return options
