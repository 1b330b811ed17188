"""The phases of a step, and a rank's record of the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from phalanx.parallel.comm.device_clock import Timestamp
from phalanx.parallel.strategy import Strategy
from phalanx.runs.step_records import StepRecord
from phalanx.schedule.action_spans import ActionSpan, spans_of_step


class StepPhaseTimer:
    """Timer of the consecutive phases of a step: data, passes, reduce, optimizer."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.clock = strategy.clock
        for timer in (strategy.comm_wait, *strategy.wait_timers.values()):
            timer.pop_seconds()  # discards the waits of an evaluation
        if strategy.pop_expert_rows is not None:
            strategy.pop_expert_rows()
        self.phase_names: list[str] = []
        self.timestamps: list[Timestamp] = [self.clock.record()]
        self.comm_wait_seconds: dict[str, float] = {}
        """Seconds of each phase spent waiting for collectives."""

    def end(self, name: str) -> None:
        """End the phase `name`, and start the next."""
        self.phase_names.append(name)
        self.timestamps.append(self.clock.record())
        self.comm_wait_seconds[name] = self.strategy.comm_wait.pop_seconds()

    def to_step_record(self, step: int, peak_memory_bytes: int) -> StepRecord:
        """Return the record of the finished step."""
        strategy = self.strategy
        # In one call: each call waits for the GPU.
        all_times = self.clock.resolve([*self.timestamps, *pass_timestamps(strategy)])
        times = all_times[: len(self.timestamps)]
        pass_times = all_times[len(self.timestamps) :]
        stages: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for span in executed_passes(strategy, pass_times):
            stages[str(span.action.stage)][str(span.action.kind)] += span.seconds
        record: StepRecord = {
            "step": step,
            "start": times[0],
            "seconds": dict(zip(self.phase_names, (b - a for a, b in pairwise(times)), strict=True)),
            "stages": {stage: dict(kinds) for stage, kinds in stages.items()},
            "peak_memory_bytes": peak_memory_bytes,
        }
        if self.clock.device.type == "cpu":  # on a GPU the host does not wait
            waits = {name: timer.pop_seconds() for name, timer in strategy.wait_timers.items()}
            pipeline = {} if strategy.pipeline_wait is None else {"pipeline": strategy.pipeline_wait.pop_seconds()}
            record["wait_seconds"] = self.comm_wait_seconds | waits | pipeline
        return record


def pass_timestamps(strategy: Strategy) -> list[Timestamp]:
    """Return start and end of each pass of the last step, as a flat list."""
    return [timestamp for _, *both in strategy.timeline for timestamp in both]


def executed_passes(strategy: Strategy, times: Sequence[float]) -> list[ActionSpan]:
    """Return the passes of the last step; `times` are those of `pass_timestamps`."""
    passes: list[ActionSpan] = []
    for (step, *_), start, end in zip(strategy.timeline, times[::2], times[1::2], strict=True):
        passes += spans_of_step(step, start, end)
    return passes
