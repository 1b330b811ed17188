"""A run as a table of facts: what `phalanx report --json` prints, and what its page and its text show.

Predicted and measured numbers stand beside each other under the same names and in the same units."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from phalanx.cost.exact.parameters import count_parameters
from phalanx.plan.predicted_vs_measured import Comparison, compare_with_prediction
from phalanx.plan.search.candidates import candidate_from_run
from phalanx.plan.search.evaluate import evaluate_layout
from phalanx.plan.search.pipeline_simulation import simulate_candidate
from phalanx.plan.search.result import EvaluatedLayout
from phalanx.plan.training_cost import configured_goodput
from phalanx.report import profiled_steps, swarm_rounds
from phalanx.report.bottlenecks import find_bottlenecks
from phalanx.report.profiled_steps import Facts
from phalanx.report.run_data import RunData, measured_peak
from phalanx.report.run_files import Line
from phalanx.report.step_breakdown import StepTimes, step_times
from phalanx.runs.events import STARTED, active_seconds_until
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
"""Of `metrics.jsonl` what is drawn over steps."""


def report_facts(recorded: RunData) -> Facts:
    """All that is said of a run. What is not known is None, or an empty list, and `problems` say why."""
    problems, run = list(recorded.problems), recorded.run
    found = step_times(recorded)
    in_swarm = bool(recorded.rounds) or recorded.swarm_journal is not None
    if found is None and not in_swarm:
        problems.append("too few steps were noted to say where their time goes: those at the start do not count")
    option = None
    if run is not None and recorded.world_size:
        try:
            option = evaluate_layout(run, recorded.world_size, run.layout)
        except UserError as error:
            first = str(error).partition("\n")[0]
            problems.append(f"the time of a step is not predicted: {first}")
    planned = _planned(run, recorded.world_size) if run is not None and option is not None else None
    named = []
    lacking = _missing_for_simulation(recorded)
    if found is not None and lacking is None:
        named = find_bottlenecks(recorded, found)
    elif found is not None:
        problems.append(f"there is no verdict: {lacking}")
    rows = [
        *step_rows(recorded, found, option, planned),
        *_rank_rows(recorded),
        *swarm_rounds.round_rows(recorded.run, recorded.world_size, recorded.rounds),
    ]
    said: Facts = _finite(
        {
            "run": _run_summary(recorded),
            "verdict": asdict(named[0]) if named else None,
            "findings": [asdict(finding) for finding in named],
            "comparison": [_row(row) for row in rows],
            "measures": _measures(recorded, found),
            "ranks": _ranks(recorded, found),
            "curves": _curves(recorded),
            "timeline": profiled_steps.pass_timeline(recorded, planned, lacking is None),
            "memory": profiled_steps.memory_timeline(recorded),
            "traffic": profiled_steps.traffic_matrix(recorded),
            "experts": profiled_steps.expert_loads(recorded),
            "problems": problems,
        }
        | ({"swarm": _in_swarm(recorded)} if in_swarm else {})
    )
    return said


def _in_swarm(recorded: RunData) -> Facts:
    """How many rounds are planned, and of a node its own, of a coordinator what it was told in each."""
    run, leads = recorded.run, recorded.swarm_journal is not None
    return {
        "planned": run.training.steps // run.swarm.steps_per_round
        if run is not None and run.swarm is not None
        else None,
        "rounds": None if leads else swarm_rounds.node_rounds(recorded.rounds),
        "told": swarm_rounds.updates_per_round(recorded.swarm_journal) if recorded.swarm_journal is not None else None,
    }


def _missing_for_simulation(recorded: RunData) -> str | None:
    """Why the schedule of a pipeline cannot be simulated with measured times; None where it can, or there is none."""
    run = recorded.run
    if run is None or run.layout.pp == 1:
        return None
    stages = representative_schedule(run.layout).stages
    known = {stage for record in recorded.ranks.values() for line in record.steps for stage in line["stages"]}
    return None if len(known) == stages else f"no rank left a record of {stages - len(known)} of {stages} stages"


def _finite(value: Any) -> Any:
    """The same without NaN and infinity, which JSON does not have: they are None."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _run_summary(recorded: RunData) -> Facts:
    run, trained = recorded.run, recorded.step_metrics
    records = recorded.ranks.values()
    about: Facts = {"leads": True} if recorded.swarm_journal is not None else {}
    about |= {
        "name": recorded.name,
        "directory": str(recorded.directory),
        "ranks": recorded.world_size,
        "hosts": sorted({record.host for record in records}),
        "device": next((record.device for record in records), None),
        "step": recorded.step,
        "failed": recorded.failure is not None,
        "under_way": recorded.under_way,
        "clock_error_seconds": max((record.error_seconds for record in records), default=0.0),
    }
    if run is not None:
        about |= {
            "steps": run.training.steps,
            "model": run.model.model_dump(mode="json", exclude_defaults=True, exclude_none=True),
            "parameters": count_parameters(run.model).total,
            "precision": run.training.precision,
            "layout": run.layout.model_dump(mode="json", exclude_defaults=True, exclude_none=True),
            "tokens_per_step": run.training.tokens_per_step,
            "optimizer": run.optimizer.model_dump(mode="json", exclude_defaults=True),
            "seed": run.training.seed,
            "peak_flops": measured_peak(run, trained, recorded.world_size),
            "sequence": run.training.seq_len,
        }
    return about


def _row(row: Comparison) -> Facts:
    interval = {} if row.interval is None else {"low": row.interval[0], "high": row.interval[1]}
    return {"what": row.quantity, "unit": row.unit, **row.to_json(), "ratio": row.ratio, **interval}


def step_rows(
    recorded: RunData, found: StepTimes | None, option: EvaluatedLayout | None, planned: Timeline | None
) -> Iterator[Comparison]:
    """Compare a step's time and its parts, the speed, the bubble and the goodput with the prediction."""
    if found is None:
        return
    parts = option.parts if option else {}

    def predicted(*names: str, but: str = "") -> float | None:
        return sum(parts[name] for name in names) - (parts[but] if but else 0.0) if parts else None

    def middle(table: Any) -> float:
        return float(np.median(table))

    interval = (option.low_seconds, option.high_seconds) if option else None
    yield Comparison("", "step", "s", option.step_seconds if option else None, found.step_seconds, interval)
    yield Comparison("", "compute", "s", predicted("compute", but="exchange"), middle(found.compute.max(1)))
    if found.waits_are_known:
        exposed = middle(found.communication.min(1))
        yield Comparison("", "exposed communication", "s", predicted("exchange", "data_parallel"), exposed)
    yield Comparison("", "update", "s", predicted("update", "offload"), middle(found.optimizer.max(1)))
    yield Comparison("", "data", "s", 0.0 if option else None, middle(found.data.max(1)))
    steps = set(found.steps)
    lines = [line for line in recorded.step_metrics if line["step"] in steps]
    for what, unit in (("tokens_per_second", "tokens/s"), ("mfu", "")):
        values = [line[what] for line in lines if line.get(what) is not None]
        if values:
            yield Comparison("", what, unit, getattr(option, what) if option else None, float(np.median(values)))
    run = recorded.run
    if run is not None and run.layout.pp > 1:
        yield Comparison("", "idle in the pipeline", "s", predicted("bubble", "send"), middle(found.idle))
        yield Comparison("", "bubble", "", float(planned.bubble) if planned else None, found.bubble)
    planned_goodput = configured_goodput(run, recorded.world_size, option) if run is not None and option else None
    yield Comparison("", "goodput", "", planned_goodput, _goodput(recorded))


def _rank_rows(recorded: RunData) -> list[Comparison]:
    """Compare memory by part and bytes by collective, of each role of ranks, in the step that was measured."""
    if recorded.run is None or not recorded.measured:
        return []
    return compare_with_prediction(recorded.run, recorded.world_size, recorded.measured)


def _planned(run: RunSpec, world_size: int) -> Timeline | None:
    """The passes of a step as the plan has them, of a pipeline."""
    if run.layout.pp == 1:
        return None
    try:
        return simulate_candidate(run, world_size, candidate_from_run(run, world_size))
    except UserError:
        return None


def _goodput(recorded: RunData) -> float | None:
    """The share of the time in which steps were done that count: not in checkpoints and evaluations, nor in what was
    lost by failures, or in starting again after them."""
    records = [record for record in recorded.ranks.values() if record.steps]
    if not records:
        return None
    first = records[0]
    lines = [*first.steps, *first.pauses]
    ends = [line["start"] + _seconds(line) for line in lines]
    whole = max(ends) - min(line["start"] for line in lines) + active_seconds_until(recorded.run_events, STARTED)
    every = recorded.run.metrics.every if recorded.run else 1
    earlier = recorded.step_metrics if recorded.run_events else []
    before = sum(line["step_seconds"] * every for line in earlier if line["step"] <= recorded.began_after)
    return (before + sum(_seconds(line) for line in first.steps)) / whole if whole else None


def _seconds(line: Line) -> float:
    seconds = line["seconds"]
    return float(sum(seconds.values())) if isinstance(seconds, dict) else float(seconds)


def _measures(recorded: RunData, found: StepTimes | None) -> Facts:
    """What has no prediction: how much steps and ranks differ, and how much of the collectives was hidden."""
    if found is None:
        return {}
    steps = found.whole.max(1)
    each = np.median(found.computing, 0)
    return {
        "steps": len(found.steps),
        "step_p95_over_median": float(np.percentile(steps, 95) / np.median(steps)),
        "step_variation": float(steps.std() / steps.mean()),
        "rank_variation": float(each.std() / each.mean()) if each.mean() else 0.0,
        "overlap": _overlap(recorded),
    }


def _overlap(recorded: RunData) -> float | None:
    """The share of the collectives' time in which the rank did something else, in the steps looked at closely."""
    calls = [
        call
        for record in recorded.ranks.values()
        for line in record.steps
        for call in line.get("collectives", ())
        if call["end"] is not None and "memory" not in line
    ]
    whole = sum(call["end"] - call["start"] for call in calls)
    return 1 - sum(call["exposed"] for call in calls) / whole if whole else None


def _ranks(recorded: RunData, found: StepTimes | None) -> list[Facts]:
    """Where each rank's steps went: medians in seconds."""
    if found is None:
        return []
    names = ("compute", "communication", "pipeline", "data", "optimizer", "unattributed")
    medians = {name: np.median(getattr(found, name), 0) for name in names}
    return [
        {"rank": rank, "host": recorded.ranks[rank].host}
        | {name: float(medians[name][at]) for name in names}
        | {"peak_memory_bytes": max(line["peak_memory_bytes"] for line in recorded.ranks[rank].steps)}
        for at, rank in enumerate(found.ranks)
    ]


def _curves(recorded: RunData) -> Facts:
    trained = recorded.step_metrics
    curves: Facts = {"step": [line["step"] for line in trained]}
    for name in CURVES:
        if any(line.get(name) is not None for line in trained):
            curves[name] = [line.get(name) for line in trained]
    curves["held_out"] = [[line["step"], line["held_out_loss"]] for line in recorded.evaluations]
    return curves
