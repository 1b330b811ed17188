"""Breakdown of the time of a run's steps on every rank, from the ranks' records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from phalanx.report.run_data import RunData, steady_steps
from phalanx.runs.jsonl import JsonRecord
from phalanx.runs.step_records import RankRecord
from phalanx.schedule.registry import layout_schedule
from phalanx.schedule.simulate import ActionTimes, Timeline, simulate
from phalanx.spec.resolved_run import ResolvedRun

Table = NDArray[np.float64]
PHASES = ("data", "passes", "reduce", "optimizer")


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of steady steps, [steps, ranks]."""

    steps: list[int]
    ranks: list[int]
    total: Table
    data: Table
    """Seconds until the rank had its tokens."""
    compute: Table
    """Seconds of forward and backward passes, without waits for collectives in them.

    On a GPU, these waits are included, because the host does not wait.
    """
    communication: Table
    """Seconds of waits for collectives; 0 on a GPU."""
    pipeline: Table
    """Seconds of waits for other stages between passes. After its last pass, a rank waits in the next collectives."""
    passes: Table
    """Seconds from a rank's first pass to its last."""
    busy: Table
    """Seconds of these in passes."""
    optimizer: Table
    rows: Table | None
    """Rows of tokens that a rank's experts computed, if ranks have different experts; no seconds."""
    has_wait_times: bool

    @cached_property
    def step_seconds(self) -> float:
        """The median time of a step, which ends with its last rank."""
        return float(np.median(self.total.max(1)))

    def share(self, seconds: Table, start: int = 0) -> float:
        """Return the share of `seconds`, given per step, in a step's time: medians from row `start` on."""
        return float(np.median(seconds[start:]) / np.median(self.total.max(1)[start:]))

    @property
    def computing(self) -> Table:
        """`compute` of the ranks that compute; servers do not."""
        return self.compute[:, np.median(self.compute, 0) > 0]

    @property
    def idle(self) -> Table:
        """Seconds without a pass while other ranks of the pipeline have one, [steps]: the mean over ranks."""
        return np.asarray(np.maximum(0.0, self.passes.max(1) - self.busy.mean(1)))

    @property
    def bubble(self) -> float:
        """The share of `idle` in the time of all passes (`Timeline.bubble`): the median over steps."""
        return float(np.median(self.idle / self.passes.max(1)))

    @property
    def unattributed(self) -> Table:
        """Seconds of a step in none of the other parts."""
        return self.total - self.data - self.compute - self.communication - self.pipeline - self.optimizer


def step_times(run_data: RunData) -> StepTimes | None:
    """Return the times of the steps that count, or None without such steps."""
    records = [run_data.ranks[rank] for rank in sorted(run_data.ranks)]
    steps = steady_steps(records, run_data.began_after)
    if not steps:
        return None
    lines = [_select_steps(record, steps) for record in records]

    def collect(value: Callable[[JsonRecord], float]) -> Table:
        return np.array([[value(line) for line in rank] for rank in lines], float).T

    rows = collect(lambda line: line["expert_rows"]) if all("expert_rows" in rank[0] for rank in lines) else None
    return StepTimes(
        steps=steps,
        ranks=[record.rank for record in records],
        total=collect(lambda line: sum(line["seconds"].values())),
        data=collect(lambda line: line["seconds"]["data"]),
        compute=collect(computed_seconds),
        communication=collect(lambda line: sum(_wait_seconds(line, phase) for phase in PHASES)),
        pipeline=collect(lambda line: _wait_seconds(line, "pipeline")),
        passes=collect(lambda line: line["seconds"]["passes"]),
        busy=collect(_sum_pass_seconds),
        optimizer=collect(lambda line: line["seconds"]["optimizer"] - _wait_seconds(line, "optimizer")),
        rows=rows,
        has_wait_times=all("wait_seconds" in rank[0] for rank in lines),
    )


def computed_seconds(line: JsonRecord) -> float:
    """Return the seconds of a step's passes, without the known waits for collectives in them."""
    return max(0.0, _sum_pass_seconds(line) - _wait_seconds(line, "passes"))


def _select_steps(record: RankRecord, steps: Sequence[int]) -> list[JsonRecord]:
    line_by_step = {line["step"]: line for line in record.steps}
    return [line_by_step[step] for step in steps]


def _sum_pass_seconds(line: JsonRecord) -> float:
    return sum(sum(kinds.values()) for kinds in line["stages"].values())


def _wait_seconds(line: JsonRecord, phase: str) -> float:
    return float(line.get("wait_seconds", {}).get(phase, 0.0))


def stage_times(run_data: RunData, steps: Sequence[int]) -> dict[int, dict[str, float]]:
    """Return the seconds of a step by stage and kind of pass: the median over steps and replicas."""
    samples: dict[int, dict[str, list[list[float]]]] = {}
    for record in run_data.ranks.values():
        for line in _select_steps(record, steps):
            for stage, kinds in line["stages"].items():
                for kind, seconds in kinds.items():
                    samples.setdefault(int(stage), {}).setdefault(kind, []).append(seconds)
    return {
        stage: {kind: float(np.median(seconds)) for kind, seconds in kinds.items()}
        for stage, kinds in sorted(samples.items())
    }


def simulate_measured(resolved: ResolvedRun, stages: dict[int, dict[str, float]], balanced: bool = False) -> Timeline:
    """Return the schedule of a pipeline's step with measured stage times, without transfer times.

    `stages` has the seconds of a step by stage and kind of pass; `balanced` gives all stages the mean time.
    """
    num_micro_batches = resolved.micro_batches

    def seconds_per_stage(*kinds: str) -> list[float]:
        """Return the seconds of a micro-batch in these kinds of passes."""
        seconds = [sum(stages[stage].get(kind, 0.0) for kind in kinds) / num_micro_batches for stage in sorted(stages)]
        return [float(np.mean(seconds))] * len(seconds) if balanced else seconds

    forward = seconds_per_stage("F")
    # A schedule with split backward passes may have full ones too; their time is added to the halves.
    backward = seconds_per_stage("B", "I")
    has_split_backward = any("I" in kinds for kinds in stages.values())
    weight_gradients = seconds_per_stage("W") if has_split_backward else 0.0
    times = ActionTimes(forward=forward, input_grad=backward, weight_grad=weight_gradients)
    return simulate(layout_schedule(resolved.layout, num_micro_batches), times)
