"""Evaluation of layouts: step time, memory, and the probability of running out of memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.estimate.memory import (
    StageMemory,
    estimate_memory,
    frozen_bytes,
    memory_utilization,
    oom_probability,
)
from phalanx.cost.estimate.step_time import PARTS, StepTime, add_teacher, step_seconds
from phalanx.cost.exact.flops import mfu, recomputed_flops_per_token, training_flops_per_token
from phalanx.cost.exact.layout_checks import check_layout, layout_error
from phalanx.cost.exact.rank_memory import RankMemory, rank_memory
from phalanx.cost.kinds import Column
from phalanx.plan.search.candidate_columns import candidate_jobs, teacher_jobs
from phalanx.plan.search.candidates import CandidateLayout, candidate_from_run
from phalanx.plan.search.oom_risk import device_and_host_bytes, layout_oom_probability, process_bytes
from phalanx.plan.search.result import EvaluatedLayout
from phalanx.plan.search.table_rows import layout_of_row, normalize_row
from phalanx.plan.tables.job_columns import interval_half_width, memory_constants_for, time_constants_for
from phalanx.spec.base import parse_table, require
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.errors import UserError
from phalanx.spec.files.tables import parse_toml_value
from phalanx.spec.layout import CheckpointingName, Layout
from phalanx.spec.resolved_run import ResolvedRun


def parse_layout(text: str) -> Layout:
    """Return the layout in a user's text: "tp=4, pp=8, data_parallel=zero1", or a row of the plan's table.

    Raises UserError if a key is not a field of `Layout`.
    """
    if (layout := layout_of_row(text)) is not None:
        return layout
    table: dict[str, object] = {}
    commas_outside_lists = r",(?![^\[]*\])"
    for setting in filter(None, (part.strip() for part in re.split(commas_outside_lists, text.replace("layout.", "")))):
        key, equals, value = (part.strip() for part in setting.partition("="))
        if not equals:
            problem = "is not of the form KEY=VALUE"
            fix = 'write, for example, "tp=4,pp=8,data_parallel=zero1", or the text of a row of the plan\'s table'
            raise UserError("layout", setting, problem, fix)
        table[key] = parse_toml_value(value)
    return parse_table(Layout, table, "layout")


def layout_to_text(layout: Layout) -> str:
    """Return a layout as text that `parse_layout` reads."""
    fields = layout.model_dump(exclude_defaults=True)
    return ",".join(f"{name}={list(value) if isinstance(value, tuple) else value}" for name, value in fields.items())


def evaluate_layout(resolved: ResolvedRun, layout: Layout) -> EvaluatedLayout:
    """Return the predicted cost of a given layout.

    Raises UserError if the layout cannot run, or the planner does not support it.
    """
    resolved = ResolvedRun(resolved.run.replace(layout=layout), resolved.world_size)
    check_layout(resolved)
    return with_exact_memory(resolved, evaluate(resolved, [candidate_from_run(resolved)])[0])


def evaluate_layout_text(resolved: ResolvedRun, text: str) -> EvaluatedLayout:
    """Return the predicted cost of the layout in a user's text (`parse_layout`).

    The offload directory is that of the run if the text has none. A row must be of a plan with the same ranks and
    batch. Raises UserError if the layout cannot run, the planner does not support it, or the row is of other ranks or
    batches.
    """
    layout = parse_layout(text)
    if layout.offload == "nvme" and layout.offload_directory is None:
        layout = layout.replace(offload_directory=resolved.layout.offload_directory)
    evaluated = evaluate_layout(resolved, layout)
    row = normalize_row(text)
    problem = f"is a row of a plan for other ranks or another batch: here, the layout is {evaluated.candidate}"
    fix = f'write the fields of the layout, such as "{layout_to_text(evaluated.candidate.layout())}"'
    require(layout_of_row(text) is None or row == str(evaluated.candidate), "layout", row, problem, fix)
    return evaluated


def can_run(resolved: ResolvedRun, candidate: CandidateLayout) -> bool:
    """Return whether Phalanx can train a layout."""
    return layout_error(resolved.with_layout(candidate.layout())) is None


def with_exact_memory(resolved: ResolvedRun, evaluated: EvaluatedLayout) -> EvaluatedLayout:
    """Return an option with Phalanx's exact memory, as `phalanx memory` counts it.

    The exact count can exceed the estimate, which is for any trainer.
    """
    memories = rank_memory(resolved.with_layout(evaluated.candidate.layout()))
    return with_counted_memory(resolved.run.cluster, evaluated, list(memories.values()))


def with_counted_memory(
    cluster: ClusterSpec, evaluated: EvaluatedLayout, memories: Sequence[RankMemory]
) -> EvaluatedLayout:
    """Return an option with exact memory."""
    device_bytes, host_bytes = device_and_host_bytes(cluster, memories)
    first_bytes, _ = device_and_host_bytes(cluster, memories[:1])
    last_bytes, _ = device_and_host_bytes(cluster, memories[-1:])

    def used_bytes(size: float) -> float:
        return process_bytes(cluster, size) if cluster.calibration else size

    return replace(
        evaluated,
        memory_bytes=used_bytes(device_bytes),
        host_bytes=host_bytes,
        stage_bytes={"first": used_bytes(first_bytes), "last": used_bytes(last_bytes)},
        p_oom=max(evaluated.p_oom, layout_oom_probability(cluster, device_bytes, host_bytes)),
    )


@dataclass(frozen=True)
class LayoutPredictions:
    """Predictions of many layouts, computed on demand: columns with a value per layout, or one where all agree."""

    cluster: ClusterSpec
    jobs: JobTable
    teachers: JobTable | None = None
    """The forward passes of a teacher, as jobs without pipelines (`candidate_columns.teacher_jobs`)."""

    @cached_property
    def time(self) -> StepTime:
        """Seconds of a step by part."""
        constants = time_constants_for(self.cluster)
        time = step_seconds(constants, self.jobs)
        return time if self.teachers is None else add_teacher(time, constants, self.teachers, self.jobs.pp)

    @cached_property
    def memory(self) -> StageMemory:
        """A formula's estimate of memory."""
        memory = estimate_memory(memory_constants_for(self.cluster), self.jobs)
        if self.teachers is None:
            return memory
        return replace(memory, state=memory.state + frozen_bytes(self.teachers) / self.jobs.pp)

    @cached_property
    def interval_factor(self) -> Column:
        """80 of 100 steps take between the predicted seconds divided by this factor, and multiplied by it."""
        return np.exp(interval_half_width(self.cluster, self.jobs))

    @cached_property
    def p_oom(self) -> Column:
        """Probability that memory is insufficient, one value per layout."""
        return self._broadcast_to_layouts(oom_probability(memory_constants_for(self.cluster), self.jobs, self.memory))

    @property
    def seconds(self) -> Column:
        """Seconds of a step, one value per layout."""
        return self._broadcast_to_layouts(self.time.total)

    @property
    def memory_bytes(self) -> Column:
        """Device memory of the fullest rank, one value per layout."""
        return self._broadcast_to_layouts(self.memory.allocated_bytes)

    @property
    def memory_utilization(self) -> Column:
        """Used / available memory of the fuller one of device and CPU, one value per layout."""
        return self._broadcast_to_layouts(
            memory_utilization(memory_constants_for(self.cluster), self.jobs, self.memory)
        )

    @property
    def recomputed_fraction(self) -> Column:
        """Fraction of the blocks that recompute activations, if any do."""
        return self.jobs.mean_recomputed

    @property
    def peak_flops(self) -> float:
        """Peak FLOP/s of one rank's device."""
        return float(self.jobs.peak_flops[0])

    def select(self, indices: NDArray[np.int64]) -> LayoutPredictions:
        """Return the predictions of some layouts."""
        teachers = None if self.teachers is None else self.teachers.select(indices)
        return LayoutPredictions(self.cluster, self.jobs.select(indices), teachers)

    def _broadcast_to_layouts(self, column: Column) -> Column:
        return np.broadcast_to(column, self.jobs.count)


def predict_layouts(resolved: ResolvedRun, layouts: list[CandidateLayout]) -> LayoutPredictions:
    """Predict time and memory of some layouts; at least one."""
    return LayoutPredictions(resolved.run.cluster, candidate_jobs(resolved, layouts), teacher_jobs(resolved, layouts))


def evaluate(resolved: ResolvedRun, layouts: list[CandidateLayout]) -> list[EvaluatedLayout]:
    """Return the predicted cost of each layout, in their order."""
    run = resolved.run
    if not layouts:
        return []
    predictions = predict_layouts(resolved, layouts)
    columns = {
        "seconds": predictions.time.total,
        "interval_factor": predictions.interval_factor,
        "recomputed_fraction": predictions.recomputed_fraction,
        "memory_bytes": predictions.memory.allocated_bytes,
        "host_bytes": predictions.memory.host_bytes,
        "p_oom": predictions.p_oom,
    }
    parts = {part: getattr(predictions.time, part) for part in PARTS}
    memory_parts = ("state", "activations", "logits", "buffers")
    bytes_by_stage = {
        stage: {part: getattr(predictions.memory, part)[index] for part in memory_parts}
        for stage, index in (("first", 0), ("last", 2))
    }
    model_flops = training_flops_per_token(run.model, run.training.seq_len)
    recomputed_flops = {
        method: recomputed_flops_per_token(run.model, run.training.seq_len, method)
        for method in get_args(CheckpointingName)
    }
    evaluated_layouts = []
    for index, candidate in enumerate(layouts):
        values = _values_at(columns, index)
        stages = {name: _values_at(stage, index) for name, stage in bytes_by_stage.items()}
        tokens_per_second = run.training.tokens_per_step / values["seconds"]
        utilization = partial(mfu, tokens_per_second, peak_flops=predictions.peak_flops, ranks=resolved.world_size)
        repeated_flops = values["recomputed_fraction"] * recomputed_flops[candidate.activation_checkpointing]
        evaluated_layouts.append(
            EvaluatedLayout(
                candidate=candidate,
                step_seconds=values["seconds"],
                low_seconds=values["seconds"] / values["interval_factor"],
                high_seconds=values["seconds"] * values["interval_factor"],
                parts=_values_at(parts, index),
                memory_bytes=values["memory_bytes"],
                host_bytes=values["host_bytes"],
                stages=stages,
                stage_bytes={name: sum(stage.values()) for name, stage in stages.items()},
                p_oom=values["p_oom"],
                tokens_per_second=tokens_per_second,
                mfu=utilization(model_flops),
                hfu=utilization(model_flops + repeated_flops),
            )
        )
    return evaluated_layouts


def _values_at(columns: dict[str, Column], index: int) -> dict[str, float]:
    """Return a row's values; a column in which all rows agree may have one element."""
    return {name: float(column[index] if column.size > 1 else column.item()) for name, column in columns.items()}
