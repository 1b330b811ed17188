"""Details of one layout: parts of a step, memory over ranks, the pipeline's timeline, traffic by kind of link."""

from __future__ import annotations

from typing import Any

from phalanx.cost.exact.layout_checks import layout_error
from phalanx.cost.exact.rank_memory import rank_memory
from phalanx.plan.placement.findings import bytes_by_link, node_layout
from phalanx.plan.placement.traffic_matrix import traffic_matrices
from phalanx.plan.search.candidates import CandidateLayout
from phalanx.plan.search.evaluate import evaluate, with_counted_memory
from phalanx.plan.search.explain import slow_link_warnings
from phalanx.plan.search.oom_risk import (
    describe_fit,
    describe_host_use,
    device_and_host_bytes,
    node_host_bytes,
    process_bytes,
)
from phalanx.plan.search.pipeline_simulation import simulate_candidate
from phalanx.plan.search.result import EvaluatedLayout
from phalanx.report.drawing.schedule import executed_spans
from phalanx.schedule.simulate import Timeline
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec

Details = dict[str, Any]
MEMORY_PARTS = ("parameters", "gradients", "optimizer", "teacher", "activations", "communication", "unused", "nccl")
MAX_ACTIONS = 20_000
"""Passes of a timeline, at most: of more, each would be narrower than a pixel."""
MIN_GAP = 1e-9
"""Share of a step below which a rank's wait between two passes is a rounding error."""


def layout_details(resolved: ResolvedRun, candidate: CandidateLayout) -> Details:
    """Return all that the page shows of a layout that was clicked, as plain data.

    A layout that Phalanx cannot train has the formula's predictions and a `problem` that says why.
    """
    run = resolved.run
    evaluated = evaluate(resolved, [candidate])[0]
    with_layout = resolved.with_layout(candidate.layout())
    if (error := layout_error(with_layout)) is not None:
        return _predictions_to_json(run, evaluated) | {"problem": str(error)}
    memories = rank_memory(with_layout)
    site = node_layout(run.cluster, run.cluster.nproc_per_node or 1)
    matrices = traffic_matrices(with_layout, site.ranks_per_island)
    evaluated = with_counted_memory(run.cluster, evaluated, list(memories.values()))
    num_actions = 3 * candidate.pp * candidate.micro_batches * candidate.virtual_stages
    if run.cluster.ranks_per_core > 1:
        timeline = {"note": "No simulation: it assumes one core per rank, but ranks share cores."}
    elif num_actions > MAX_ACTIONS:
        timeline = {"note": f"The schedule has {num_actions:,} passes; a page can show at most {MAX_ACTIONS:,}."}
    else:
        timeline = timeline_to_json(simulate_candidate(resolved, candidate))
    # Bytes of the fullest rank of each role by part, and the most of all parts at one time with driver and libraries
    memory_by_role = {}
    for role, memory in memories.items():
        parts = {part: getattr(memory, part) for part in MEMORY_PARTS}
        if run.cluster.device == "cpu":
            parts["offloaded"] = memory.host
        parts["process"] = process_bytes(run.cluster, 0)
        held_bytes, _ = device_and_host_bytes(run.cluster, [memory])
        memory_by_role[role] = {"parts": parts, "peak_bytes": process_bytes(run.cluster, held_bytes)}
    return _predictions_to_json(run, evaluated) | {
        "counted_bytes": evaluated.memory_bytes,
        "host_use": describe_host_use(candidate.offloads),
        "fit": describe_fit(evaluated.p_oom),
        "memory": memory_by_role,
        "traffic": {axis: bytes_by_link(matrix, site) for axis, matrix in matrices.items()},
        "timeline": timeline,
    }


def _predictions_to_json(run: RunSpec, evaluated: EvaluatedLayout) -> Details:
    """Predictions that need no layout that runs."""
    fields = ("step_seconds", "low_seconds", "high_seconds", "parts", "p_oom", "tokens_per_second", "mfu", "hfu")
    return {
        **{field: getattr(evaluated, field) for field in fields},
        "name": str(evaluated.candidate),
        "node_host_bytes": node_host_bytes(run.cluster, evaluated.host_bytes),
        "host_use": "offloaded state, estimated; checkpoint copies are not included",
        "warnings": slow_link_warnings(run, evaluated.candidate),
    }


def timeline_to_json(timeline: Timeline) -> Details:
    """Return a timeline in few numbers: order and durations of passes, and the waits between them.

    `ranks` has for each rank its passes in order: `kinds` a letter each, `stages` and `micros` a number each, and
    `waits`, pairs of a pass's position and the seconds that the rank waits before it. `seconds` are the durations of
    passes by kind and stage. A pass starts where the last one ended, after its wait.
    """
    seconds: dict[str, dict[int, float]] = {}
    ranks: list[Details] = [{"kinds": "", "stages": [], "micros": [], "waits": []} for _ in timeline.spans]
    ends = [0.0] * len(ranks)
    min_wait = MIN_GAP * float(timeline.makespan)
    for index, span in executed_spans(timeline):
        rank = ranks[index]
        action = span.action
        wait_seconds = span.start - ends[index]
        if wait_seconds > min_wait:
            rank["waits"].append([len(rank["kinds"]), _round_seconds(wait_seconds)])
        rank["kinds"] += action.kind
        rank["stages"].append(action.stage)
        rank["micros"].append(action.micro)
        seconds.setdefault(action.kind, {}).setdefault(action.stage, _round_seconds(span.seconds))
        ends[index] = span.end
    return {"makespan": float(timeline.makespan), "seconds": seconds, "ranks": ranks}


def _round_seconds(seconds: float) -> float:
    return float(f"{seconds:.7g}")
