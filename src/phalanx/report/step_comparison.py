"""Times, speed, bubble and goodput of a run's steps, compared with the prediction.

Why: `docs/design/decisions/report-asks-planner.md`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from phalanx.plan.predicted_vs_measured import Comparison
from phalanx.plan.search.result import EvaluatedLayout
from phalanx.plan.training_cost import configured_goodput
from phalanx.report.run_data import RunData
from phalanx.report.step_breakdown import StepTimes
from phalanx.runs.events import STARTED, active_seconds_until
from phalanx.runs.jsonl import JsonRecord
from phalanx.runs.metrics import has_ignored_targets
from phalanx.schedule.simulate import Timeline


def step_rows(
    run_data: RunData, times: StepTimes, evaluated: EvaluatedLayout | None, planned_timeline: Timeline | None
) -> Iterator[Comparison]:
    """Compare a step and its parts, speed, bubble and goodput with the prediction (`evaluated`), if there is one.

    Parts of a step are those of the slowest rank.
    """
    run = run_data.run
    step_seconds = evaluated.step_seconds if evaluated else None
    interval = (evaluated.low_seconds, evaluated.high_seconds) if evaluated else None
    yield _compare_quantity("step", "s", step_seconds, times.step_seconds, interval)
    yield _compare_quantity("compute", "s", _sum_predicted_parts(evaluated, "compute"), _median(times.compute.max(1)))
    if times.has_wait_times:
        communication = _sum_predicted_parts(evaluated, "exchange", "data_parallel")
        yield _compare_quantity("exposed communication", "s", communication, _median(times.communication.min(1)))
    yield _compare_quantity(
        "update", "s", _sum_predicted_parts(evaluated, "update", "offload"), _median(times.optimizer.max(1))
    )
    yield _compare_quantity("data", "s", 0.0 if evaluated else None, _median(times.data.max(1)))

    steps = set(times.steps)
    lines = [line for line in run_data.step_metrics if line["step"] in steps]
    targets = {"targets_per_second": "tokens/s"} if any(map(has_ignored_targets, lines)) else {}
    for metric, unit in {"tokens_per_second": "tokens/s", **targets, "mfu": ""}.items():
        values = [line[metric] for line in lines if line.get(metric) is not None]
        if values:
            yield _compare_quantity(metric, unit, getattr(evaluated, metric, None), _median(values))

    if run is not None and run.layout.pp > 1:
        yield _compare_quantity(
            "idle in the pipeline", "s", _sum_predicted_parts(evaluated, "bubble", "send"), _median(times.idle)
        )
        bubble = float(planned_timeline.bubble) if planned_timeline else None
        yield _compare_quantity("bubble", "", bubble, times.bubble)
    resolved = run_data.resolved
    planned_goodput = configured_goodput(resolved, evaluated) if resolved and evaluated else None
    yield _compare_quantity("goodput", "", planned_goodput, _measure_goodput(run_data))


def _compare_quantity(
    quantity: str,
    unit: str,
    predicted: float | None,
    measured: float | None,
    interval: tuple[float, float] | None = None,
) -> Comparison:
    """Return the comparison of a quantity of all ranks together."""
    return Comparison(role="", quantity=quantity, unit=unit, predicted=predicted, measured=measured, interval=interval)


def _sum_predicted_parts(evaluated: EvaluatedLayout | None, *parts: str) -> float | None:
    return sum(evaluated.parts[name] for name in parts) if evaluated and evaluated.parts else None


def _median(values: Any) -> float:
    return float(np.median(values))


def _measure_goodput(run_data: RunData) -> float | None:
    """Return the share of the active time in steps that count.

    Lost time is in checkpoints, evaluations, failures and restarts.
    """
    records = [record for record in run_data.ranks.values() if record.steps]
    if not records:
        return None
    first_record = records[0]
    lines = [*first_record.steps, *first_record.pauses]
    start = min(line["start"] for line in lines)
    end = max(line["start"] + _sum_seconds(line) for line in lines)
    total_seconds = end - start + active_seconds_until(run_data.run_events, STARTED)
    if not total_seconds:
        return None
    # A record stands for the steps since the one before it: not all are written (metrics.every).
    first_step = first_record.steps[0]["step"]
    earlier_seconds = 0.0
    last_step = 0
    for line in run_data.step_metrics if run_data.run_events else []:
        if line["step"] < first_step:
            earlier_seconds += line["step_seconds"] * (line["step"] - last_step)
            last_step = line["step"]
    recorded_seconds = sum(_sum_seconds(line) for line in first_record.steps)
    return float(earlier_seconds + recorded_seconds) / float(total_seconds)


def _sum_seconds(line: JsonRecord) -> float:
    seconds = line["seconds"]
    return float(sum(seconds.values())) if isinstance(seconds, dict) else float(seconds)
