"""The phases of a step, and a rank's record of the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from phalanx.parallel.comm.device_clock import Timestamp
from phalanx.parallel.strategy import Strategy
from phalanx.runs.step_records import StepRecord
from phalanx.schedule.action_spans import ActionSpan, spans_of_step
from phalanx.schedule.schedule import ScheduleStep

Timeline = Sequence[tuple[ScheduleStep, Timestamp, Timestamp]]
"""The passes of this rank in a step, with start and end (`Strategy.timeline`)."""


class StepPhaseTimer:
    """Timer of the consecutive phases of a step: data, passes, reduce, optimizer."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.clock = strategy.clock
        for timer in (strategy.comm_wait, *strategy.model_parallel.wait_timers.values()):
            # Discard the waits of an evaluation.
            timer.pop_seconds()
        if strategy.model_parallel.pop_expert_rows is not None:
            strategy.model_parallel.pop_expert_rows()
        self.phase_names: list[str] = []
        self.timestamps: list[Timestamp] = [self.clock.record()]
        self.comm_wait_seconds: dict[str, float] = {}
        """Seconds of each phase spent waiting for collectives."""
        self.timeline: Timeline = []
        self.wait_seconds: dict[str, float] | None = None
        """Waiting times of the finished step, on a CPU."""

    def end(self, name: str) -> None:
        """End the phase `name`, and start the next."""
        self.phase_names.append(name)
        self.timestamps.append(self.clock.record())
        self.comm_wait_seconds[name] = self.strategy.comm_wait.pop_seconds()

    def finish(self) -> None:
        """Keep the values that the next step replaces: the timeline of passes, and on a CPU the waiting times."""
        self.timeline = self.strategy.timeline
        if self.clock.device.type == "cpu":  # on a GPU the host does not wait
            timers = dict(self.strategy.model_parallel.wait_timers)
            if self.strategy.pipeline_wait is not None:
                timers["pipeline"] = self.strategy.pipeline_wait
            waits = {name: timer.pop_seconds() for name, timer in timers.items()}
            self.wait_seconds = self.comm_wait_seconds | waits

    def to_step_record(self, step: int, peak_memory_bytes: int) -> StepRecord:
        """Return the record of the finished step; waits until a GPU has run it, and rarely for later steps."""
        # All timestamps are resolved in one call, because each call waits for the GPU.
        all_times = self.clock.resolve([*self.timestamps, *pass_timestamps(self.timeline)])
        times = all_times[: len(self.timestamps)]
        pass_times = all_times[len(self.timestamps) :]
        stages: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for span in executed_passes(self.timeline, pass_times):
            stages[str(span.action.stage)][str(span.action.kind)] += span.seconds
        record: StepRecord = {
            "step": step,
            "start": times[0],
            "seconds": dict(zip(self.phase_names, (b - a for a, b in pairwise(times)), strict=True)),
            "stages": {stage: dict(kinds) for stage, kinds in stages.items()},
            "peak_memory_bytes": peak_memory_bytes,
        }
        if self.wait_seconds is not None:
            record["wait_seconds"] = self.wait_seconds
        return record


def pass_timestamps(timeline: Timeline) -> list[Timestamp]:
    """Return start and end of each pass of a step, as a flat list."""
    return [timestamp for _, start, end in timeline for timestamp in (start, end)]


def executed_passes(timeline: Timeline, times: Sequence[float]) -> list[ActionSpan]:
    """Return the passes of a step; `times` are those of `pass_timestamps`."""
    passes: list[ActionSpan] = []
    for (step, *_), start, end in zip(timeline, times[::2], times[1::2], strict=True):
        passes += spans_of_step(step, start, end)
    return passes
