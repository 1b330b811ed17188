"""What steps that were looked at closely show: their passes, memory over time, experts; and who sends to whom."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phalanx.plan.placement.traffic_matrix import merge_matrices, traffic_matrices
from phalanx.report.drawing.schedule import executed_spans
from phalanx.report.run_data import RunData
from phalanx.report.run_files import Line
from phalanx.report.step_breakdown import simulate_measured, stage_times
from phalanx.schedule.simulate import Timeline
from phalanx.spec.errors import UserError

Facts = dict[str, Any]


def pass_timeline(recorded: RunData, planned: Timeline | None, simulates: bool) -> Facts | None:
    """Passes of one step: rank, kind, stage, micro-batch, begin and end in seconds, as the plan has them, as the
    schedule has them with the times that were measured, and as they were."""
    closely = [step for step in recorded.profiled_steps if not _metered(recorded, step)] or recorded.profiled_steps
    run = recorded.run
    if not closely:
        return None
    step = closely[-1]
    spans = [
        (rank, kind, stage, micro, begun, ended)
        for rank, record in sorted(recorded.ranks.items())
        for line in record.steps
        if line["step"] == step
        for kind, stage, micro, begun, ended in on_rank0_clock(line, record.offset_seconds)
    ]
    first = min((begun for *_, begun, _ in spans), default=0.0)
    found: Facts = {
        "step": step,
        "metered": _metered(recorded, step),
        "measured": [[*who, a - first, b - first] for *who, a, b in spans],
    }
    if run is not None and run.layout.pp > 1 and simulates and len(recorded.ranks) == recorded.world_size:
        found["simulated"] = _drawn(simulate_measured(run, recorded.world_size, stage_times(recorded, [step])))
        found["planned"] = _drawn(planned) if planned else None
    return found


def on_rank0_clock(line: Line, offset_seconds: float) -> Iterator[tuple[str, int, int, float, float]]:
    """The passes of a step on the clock of rank 0."""
    offset = line["clock"][0] if "clock" in line else offset_seconds
    for kind, stage, micro, begun, ended in line["spans"]:
        yield kind, stage, micro, begun + offset, ended + offset


def _drawn(of: Timeline) -> list[list[Any]]:
    return [[rank, action.kind, action.stage, action.micro, a, b] for rank, action, a, b in executed_spans(of)]


def _metered(recorded: RunData, step: int) -> bool:
    return any(line["step"] == step and "memory" in line for record in recorded.ranks.values() for line in record.steps)


def memory_timeline(recorded: RunData) -> Facts | None:
    """Bytes by part over the step that was metered, of the rank that held most at any time."""
    metered = [
        (sum(value for name, value in moment.items() if name != "at"), record.rank, line)
        for record in recorded.ranks.values()
        for line in record.steps
        for moment in line.get("memory", ())
    ]
    if not metered:
        return None
    _, rank, line = max(metered, key=lambda found: found[0])
    names = [name for name in dict.fromkeys(name for moment in line["memory"] for name in moment) if name != "at"]
    begun = line["memory"][0]["at"]
    return {
        "rank": rank,
        "step": line["step"],
        "seconds": [moment["at"] - begun for moment in line["memory"]],
        "bytes": {name: [moment.get(name, 0) for moment in line["memory"]] for name in names},
    }


def traffic_matrix(recorded: RunData) -> Facts | None:
    """Bytes of an update from each rank to each, as planned (the step's own totals are in `beside`)."""
    run, ranks = recorded.run, recorded.world_size
    if run is None or not 1 < ranks <= 256:
        return None
    try:
        axes = traffic_matrices(run, ranks, run.cluster.nproc_per_node or ranks)
    except UserError:
        return None
    return {
        "bytes": merge_matrices(ranks, list(axes.values())).to_dense().round().tolist(),
        "axes": {axis: matrix.total for axis, matrix in axes.items()},
    }


def expert_loads(recorded: RunData) -> Facts | None:
    """Tokens that chose each expert of each layer with experts: of the last step looked at closely, or up to the last
    evaluation."""
    run = recorded.run
    noted = [line for record in recorded.ranks.values() for line in record.steps if "expert_tokens" in line]
    told = [line for line in recorded.evaluations if line.get("expert_tokens")]
    if run is None or not (noted or told):
        return None
    line = max(noted, key=lambda line: int(line["step"])) if noted else told[-1]
    layers = [layer for layer in range(run.model.num_layers) if run.model.is_moe_layer(layer)]
    return {"step": line["step"], "layers": layers, "tokens": line["expert_tokens"]}
