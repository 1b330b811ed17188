"""Facts of profiled steps: passes, memory over time, traffic between ranks, and loads of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phalanx.plan.placement.traffic_matrix import merge_matrices, traffic_matrices
from phalanx.report.drawing.schedule import executed_spans
from phalanx.report.run_data import RunData
from phalanx.report.step_breakdown import simulate_measured, stage_times
from phalanx.runs.jsonl import JsonRecord
from phalanx.schedule.action_spans import ActionSpan
from phalanx.schedule.simulate import Timeline
from phalanx.spec.errors import UserError
from phalanx.spec.layers import expert_layers

Facts = dict[str, Any]


def pass_timeline(
    run_data: RunData, planned: Timeline | None, planned_speed: float, can_simulate: bool
) -> Facts | None:
    """Return the passes of one step: planned, simulated with measured times, and measured.

    The planned passes are drawn `planned_speed` times as fast as in the simulation, which assumes that ranks always
    share their cores with others.
    A pass is a row of rank, kind, stage, micro-batch, start and end in seconds. `can_simulate` says whether the
    times of all stages are known.
    """
    profiled_steps = run_data.profiled_steps
    if not profiled_steps:
        return None
    resolved = run_data.resolved
    unmetered_steps = [step for step in profiled_steps if not _has_memory_samples(run_data, step)]
    step = (unmetered_steps or profiled_steps)[-1]
    spans = [
        (rank, span)
        for rank, record in sorted(run_data.ranks.items())
        for line in record.steps
        if line["step"] == step
        for span in on_rank0_clock(line, record.offset_seconds)
    ]
    origin = min((span.start for _, span in spans), default=0.0)
    timeline: Facts = {
        "step": step,
        "metered": _has_memory_samples(run_data, step),
        "measured": [[rank, *span.shifted(-origin).to_row()] for rank, span in spans],
    }
    has_all_ranks = len(run_data.ranks) == run_data.world_size
    if resolved is not None and resolved.layout.pp > 1 and can_simulate and has_all_ranks:
        timeline["simulated"] = _timeline_to_rows(simulate_measured(resolved, stage_times(run_data, [step])))
        timeline["planned"] = _timeline_to_rows(planned, planned_speed) if planned else None
    return timeline


def on_rank0_clock(line: JsonRecord, offset_seconds: float) -> Iterator[ActionSpan]:
    """Yield the passes of a step on the clock of rank 0."""
    offset = line["clock"][0] if "clock" in line else offset_seconds
    for row in line["spans"]:
        yield ActionSpan.from_row(row).shifted(offset)


def _timeline_to_rows(timeline: Timeline, speed: float = 1.0) -> list[list[Any]]:
    spans = executed_spans(timeline)
    return [[rank, *span.to_row()[:-2], span.start / speed, span.end / speed] for rank, span in spans]


def _has_memory_samples(run_data: RunData, step: int) -> bool:
    return any(line["step"] == step and "memory" in line for record in run_data.ranks.values() for line in record.steps)


def memory_timeline(run_data: RunData) -> Facts | None:
    """Return the bytes by part over a step with memory samples, for the rank with the highest peak."""
    metered = [
        (sum(value for name, value in sample.items() if name != "at"), record.rank, line)
        for record in run_data.ranks.values()
        for line in record.steps
        for sample in line.get("memory", ())
    ]
    if not metered:
        return None
    _, rank, line = max(metered, key=lambda total_and_source: total_and_source[0])
    names = [name for name in dict.fromkeys(name for sample in line["memory"] for name in sample) if name != "at"]
    start = line["memory"][0]["at"]
    return {
        "rank": rank,
        "step": line["step"],
        "seconds": [sample["at"] - start for sample in line["memory"]],
        "bytes": {name: [sample.get(name, 0) for sample in line["memory"]] for name in names},
    }


def traffic_matrix(run_data: RunData) -> Facts | None:
    """Return the planned bytes of a step from each rank to each; the measured totals are in `comparison`."""
    resolved = run_data.resolved
    world_size = run_data.world_size
    if resolved is None or not 1 < world_size <= 256:
        return None
    try:
        axes = traffic_matrices(resolved, resolved.run.cluster.nproc_per_node or world_size)
    except UserError:
        return None
    return {
        "bytes": merge_matrices(world_size, list(axes.values())).to_dense().round().tolist(),
        "axes": {axis: matrix.total for axis, matrix in axes.items()},
    }


def expert_loads(run_data: RunData) -> Facts | None:
    """Return the tokens of each expert in each layer with experts.

    They are those of the last profiled step, or of all steps up to the last evaluation.
    """
    run = run_data.run
    profiled_records = [line for record in run_data.ranks.values() for line in record.steps if "expert_tokens" in line]
    evaluations = [line for line in run_data.evaluations if line.get("expert_tokens")]
    if run is None or not (profiled_records or evaluations):
        return None
    line = max(profiled_records, key=lambda line: int(line["step"])) if profiled_records else evaluations[-1]
    return {"step": line["step"], "layers": list(expert_layers(run.model)), "tokens": line["expert_tokens"]}
