"""The phases of a step, and the line that a rank notes of it."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from phalanx.measure.record import StepLine
from phalanx.parallel.clock import Mark
from phalanx.parallel.strategy import Strategy
from phalanx.schedule.action import actions


class Phases:
    """What a rank does in a step, one after the other: data, passes, reduce, optimizer."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy, self.clock = strategy, strategy.clock
        for waited in (strategy.exposed, *strategy.waits_by_name.values()):
            waited.take()  # that of an evaluation
        if strategy.rows is not None:
            strategy.rows()
        self.names: list[str] = []
        self.marks: list[Mark] = [self.clock.now()]
        self.waited: dict[str, float] = {}
        """Of each, for collectives."""

    def end(self, name: str) -> None:
        """The phase `name` is over, and the next begins."""
        self.names.append(name)
        self.marks.append(self.clock.now())
        self.waited[name] = self.strategy.exposed.take()

    def line(self, step: int, peak_memory_bytes: int) -> StepLine:
        """What there is to say of the step, which is over."""
        strategy, marks = self.strategy, self.clock.read(self.marks)
        stages: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for kind, stage, _, begun, ended in passes_of(strategy):
            stages[str(stage)][kind] += ended - begun
        line: StepLine = {
            "step": step,
            "began": marks[0],
            "seconds": dict(zip(self.names, (b - a for a, b in pairwise(marks)), strict=True)),
            "stages": {stage: dict(kinds) for stage, kinds in stages.items()},
            "peak_memory_bytes": peak_memory_bytes,
        }
        if self.clock.device.type == "cpu":  # on a GPU the host does not wait
            waits = {name: waited.take() for name, waited in strategy.waits_by_name.items()}
            pipeline = {} if strategy.waits is None else {"pipeline": strategy.waits.take()}
            line["waited"] = self.waited | waits | pipeline
        return line


def passes_of(strategy: Strategy) -> list[tuple[str, int, int, float, float]]:
    """Kind, stage, micro-batch, begin and end of each pass of the last step; two that overlap follow each other, and
    share their time."""
    moments = strategy.clock.read([mark for _, *both in strategy.timeline for mark in both])
    found = []
    for (step, *_), begun, ended in zip(strategy.timeline, moments[::2], moments[1::2], strict=True):
        both = actions(step)
        each = (ended - begun) / len(both)
        for place, (stage, kind, micro) in enumerate(both):
            found.append((str(kind), stage, micro, begun + place * each, begun + (place + 1) * each))
    return found
