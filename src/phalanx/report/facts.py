"""Facts of a run as one table: the output of `phalanx report --json`, shown by the page and the text.

Predicted and measured numbers have the same names and units.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np

from phalanx.cost.exact.parameters import count_parameters
from phalanx.plan.predicted_vs_measured import Comparison, compare_with_prediction
from phalanx.plan.search.candidates import candidate_from_run
from phalanx.plan.search.evaluate import evaluate_layout
from phalanx.plan.search.pipeline_simulation import simulate_candidate
from phalanx.report import profiled_steps, swarm_rounds
from phalanx.report.bottlenecks import find_bottlenecks
from phalanx.report.profiled_steps import Facts
from phalanx.report.run_data import RunData, measured_peak
from phalanx.report.step_breakdown import StepTimes, step_times
from phalanx.report.step_comparison import step_rows
from phalanx.schedule.registry import representative_schedule
from phalanx.schedule.simulate import Timeline
from phalanx.spec.errors import UserError
from phalanx.spec.run import RunSpec

CURVES = (
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
    "step_seconds",
    "mfu",
    "peak_memory_bytes",
    "hot_expert_share",
)
"""Fields of `metrics.jsonl` that are drawn over steps."""


def report_facts(run_data: RunData) -> Facts:
    """Return the facts of a run. Unknown ones are None or an empty list, and `problems` has the reasons."""
    problems = list(run_data.problems)
    run = run_data.run
    times = step_times(run_data)
    is_swarm = bool(run_data.rounds) or run_data.swarm_journal is not None
    if times is None and not is_swarm:
        problems.append("too few steps were recorded for a time breakdown, which excludes the first steps")
    option = None
    if run is not None and run_data.world_size:
        try:
            option = evaluate_layout(run, run_data.world_size, run.layout)
        except UserError as error:
            first_line = str(error).partition("\n")[0]
            problems.append(f"the step time cannot be predicted: {first_line}")
    planned_timeline = _planned_timeline(run, run_data.world_size) if run is not None and option is not None else None
    bottlenecks = []
    simulation_problem = _missing_for_simulation(run_data)
    if times is not None and simulation_problem is None:
        bottlenecks = find_bottlenecks(run_data, times)
    elif times is not None:
        problems.append(f"no verdict is possible: {simulation_problem}")
    rows = [
        *step_rows(run_data, times, option, planned_timeline=planned_timeline),
        *_rank_rows(run_data),
        *swarm_rounds.round_rows(run_data.run, run_data.world_size, run_data.rounds),
    ]
    facts: Facts = _replace_non_finite(
        {
            "run": _run_summary(run_data),
            "verdict": asdict(bottlenecks[0]) if bottlenecks else None,
            "findings": [asdict(finding) for finding in bottlenecks],
            "comparison": [_comparison_row(row) for row in rows],
            "measures": _measures(run_data, times),
            "ranks": _ranks(run_data, times),
            "curves": _curves(run_data),
            "timeline": profiled_steps.pass_timeline(run_data, planned_timeline, simulation_problem is None),
            "memory": profiled_steps.memory_timeline(run_data),
            "traffic": profiled_steps.traffic_matrix(run_data),
            "experts": profiled_steps.expert_loads(run_data),
            "problems": problems,
        }
        | ({"swarm": _swarm_facts(run_data)} if is_swarm else {})
    )
    return facts


def _swarm_facts(run_data: RunData) -> Facts:
    """Return the number of planned rounds, and a node's rounds or the updates to a coordinator per round."""
    run = run_data.run
    is_coordinator = run_data.swarm_journal is not None
    return {
        "planned": run.training.steps // run.swarm.steps_per_round
        if run is not None and run.swarm is not None
        else None,
        "rounds": None if is_coordinator else swarm_rounds.node_rounds(run_data.rounds),
        "told": swarm_rounds.updates_per_round(run_data.swarm_journal) if run_data.swarm_journal is not None else None,
    }


def _missing_for_simulation(run_data: RunData) -> str | None:
    """Return why a pipeline cannot be simulated with measured times, or None if it can."""
    run = run_data.run
    if run is None or run.layout.pp == 1:
        return None
    stages = representative_schedule(run.layout).stages
    known = {stage for record in run_data.ranks.values() for line in record.steps for stage in line["stages"]}
    return None if len(known) == stages else f"no rank recorded {stages - len(known)} of {stages} stages"


def _replace_non_finite(value: Any) -> Any:
    """Return a value in which NaN and infinity, which JSON does not have, are None."""
    if isinstance(value, dict):
        return {name: _replace_non_finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _run_summary(run_data: RunData) -> Facts:
    run = run_data.run
    step_metrics = run_data.step_metrics
    records = run_data.ranks.values()
    summary: Facts = {"leads": True} if run_data.swarm_journal is not None else {}
    summary |= {
        "name": run_data.name,
        "directory": str(run_data.directory),
        "ranks": run_data.world_size,
        "hosts": sorted({record.host for record in records}),
        "device": next((record.device for record in records), None),
        "step": run_data.step,
        "failed": run_data.failure is not None,
        "under_way": run_data.in_progress,
        "clock_error_seconds": max((record.error_seconds for record in records), default=0.0),
    }
    if run is not None:
        summary |= {
            **({"steps": run.training.steps} if run.training.has_decided_steps else {}),
            "model": run.model.model_dump(mode="json", exclude_defaults=True, exclude_none=True),
            "parameters": count_parameters(run.model).total,
            "precision": run.training.precision,
            "layout": run.layout.model_dump(mode="json", exclude_defaults=True, exclude_none=True),
            "tokens_per_step": run.training.tokens_per_step,
            "optimizer": run.optimizer.model_dump(mode="json", exclude_defaults=True),
            "seed": run.training.seed,
            "peak_flops": measured_peak(run, step_metrics, run_data.world_size),
            "sequence": run.training.seq_len,
        }
    return summary


def _comparison_row(row: Comparison) -> Facts:
    interval = {} if row.interval is None else {"low": row.interval[0], "high": row.interval[1]}
    return {"what": row.quantity, "unit": row.unit, **row.to_json(), "ratio": row.ratio, **interval}


def _rank_rows(run_data: RunData) -> list[Comparison]:
    """Compare memory by part and bytes by collective of each role of ranks in the measured step."""
    if run_data.run is None or not run_data.measured:
        return []
    return compare_with_prediction(run_data.run, run_data.world_size, run_data.measured)


def _planned_timeline(run: RunSpec, world_size: int) -> Timeline | None:
    """Return the planned timeline of a pipeline's step, or None without a pipeline."""
    if run.layout.pp == 1:
        return None
    try:
        return simulate_candidate(run, world_size, candidate_from_run(run, world_size))
    except UserError:
        return None


def _measures(run_data: RunData, times: StepTimes | None) -> Facts:
    """Return measures without a prediction: variation of steps and ranks, and overlap of collectives."""
    if times is None:
        return {}
    steps = times.total.max(1)
    rank_seconds = np.median(times.computing, 0)
    return {
        "steps": len(times.steps),
        "step_p95_over_median": float(np.percentile(steps, 95) / np.median(steps)),
        "step_variation": float(steps.std() / steps.mean()),
        "rank_variation": float(rank_seconds.std() / rank_seconds.mean()) if rank_seconds.mean() else 0.0,
        "overlap": _overlap(run_data),
    }


def _overlap(run_data: RunData) -> float | None:
    """Return the share of the collectives' time in profiled steps in which the rank did not wait for them."""
    calls = [
        call
        for record in run_data.ranks.values()
        for line in record.steps
        for call in line.get("collectives", ())
        if call["end"] is not None and "memory" not in line
    ]
    total_seconds = sum(call["end"] - call["start"] for call in calls)
    return 1 - sum(call["exposed"] for call in calls) / total_seconds if total_seconds else None


def _ranks(run_data: RunData, times: StepTimes | None) -> list[Facts]:
    """Return the time breakdown of each rank: medians in seconds."""
    if times is None:
        return []
    names = ("compute", "communication", "pipeline", "data", "optimizer", "unattributed")
    medians = {name: np.median(getattr(times, name), 0) for name in names}
    return [
        {"rank": rank, "host": run_data.ranks[rank].host}
        | {name: float(medians[name][index]) for name in names}
        | {"peak_memory_bytes": max(line["peak_memory_bytes"] for line in run_data.ranks[rank].steps)}
        for index, rank in enumerate(times.ranks)
    ]


def _curves(run_data: RunData) -> Facts:
    step_metrics = run_data.step_metrics
    curves: Facts = {"step": [line["step"] for line in step_metrics]}
    for name in CURVES:
        if any(line.get(name) is not None for line in step_metrics):
            curves[name] = [line.get(name) for line in step_metrics]
    curves["held_out"] = [[line["step"], line["held_out_loss"]] for line in run_data.evaluations]
    return curves
