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
    run_data: RunData, times: StepTimes, option: EvaluatedLayout | None, planned_timeline: Timeline | None
) -> Iterator[Comparison]:
    """Compare a step and its parts, speed, bubble and goodput with the prediction (`option`), if there is one.

    Parts of a step are those of the slowest rank.
    """
    run = run_data.run
    step_seconds = option.step_seconds if option else None
    interval = (option.low_seconds, option.high_seconds) if option else None
    yield _row("step", "s", step_seconds, times.step_seconds, interval)
    yield _row("compute", "s", _predicted_seconds(option, "compute"), _median(times.compute.max(1)))
    if times.has_wait_times:
        communication = _predicted_seconds(option, "exchange", "data_parallel")
        yield _row("exposed communication", "s", communication, _median(times.communication.min(1)))
    yield _row("update", "s", _predicted_seconds(option, "update", "offload"), _median(times.optimizer.max(1)))
    yield _row("data", "s", 0.0 if option else None, _median(times.data.max(1)))

    steps = set(times.steps)
    lines = [line for line in run_data.step_metrics if line["step"] in steps]
    targets = {"targets_per_second": "tokens/s"} if any(map(has_ignored_targets, lines)) else {}
    for metric, unit in {"tokens_per_second": "tokens/s", **targets, "mfu": ""}.items():
        values = [line[metric] for line in lines if line.get(metric) is not None]
        if values:
            yield _row(metric, unit, getattr(option, metric, None), _median(values))

    if run is not None and run.layout.pp > 1:
        yield _row("idle in the pipeline", "s", _predicted_seconds(option, "bubble", "send"), _median(times.idle))
        bubble = float(planned_timeline.bubble) if planned_timeline else None
        yield _row("bubble", "", bubble, times.bubble)
    planned_goodput = configured_goodput(run, run_data.world_size, option) if run is not None and option else None
    yield _row("goodput", "", planned_goodput, _goodput(run_data))


def _row(
    quantity: str,
    unit: str,
    predicted: float | None,
    measured: float | None,
    interval: tuple[float, float] | None = None,
) -> Comparison:
    """Return the comparison of a quantity of all ranks together."""
    return Comparison(role="", quantity=quantity, unit=unit, predicted=predicted, measured=measured, interval=interval)


def _predicted_seconds(option: EvaluatedLayout | None, *parts: str) -> float | None:
    return sum(option.parts[name] for name in parts) if option and option.parts else None


def _median(values: Any) -> float:
    return float(np.median(values))


def _goodput(run_data: RunData) -> float | None:
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
    metrics_interval = run_data.run.metrics.every if run_data.run else 1
    earlier_metrics = run_data.step_metrics if run_data.run_events else []
    earlier_seconds = sum(
        line["step_seconds"] * metrics_interval for line in earlier_metrics if line["step"] <= run_data.began_after
    )
    recorded_seconds = sum(_sum_seconds(line) for line in first_record.steps)
    return float(earlier_seconds + recorded_seconds) / float(total_seconds)


def _sum_seconds(line: JsonRecord) -> float:
    seconds = line["seconds"]
    return float(sum(seconds.values())) if isinstance(seconds, dict) else float(seconds)
