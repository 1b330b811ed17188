"""Steps looked at from inside: when each pass, wait and collective was, what each rank held by part."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

from torch import Tensor

from phalanx.data.loader import Batch
from phalanx.measure.collectives import Collective, CollectiveRecorder
from phalanx.measure.flops import FlopMeter
from phalanx.measure.memory import MemoryMeter
from phalanx.measure.record import CollectiveSpan, StepLine, thinned
from phalanx.parallel.collectives import ASKED_FOR
from phalanx.parallel.data import POWERSGD_FROM_STEP
from phalanx.parallel.strategy import Reduced, Strategy
from phalanx.spec.run import RunSpec
from phalanx.train.clocks import Offset, clock_offset
from phalanx.train.learner import Learner
from phalanx.train.measured import write_measured
from phalanx.train.metrics import Record
from phalanx.train.phases import passes_of
from phalanx.train.trainer import Trainer

MEASURED_STEP = 3
"""Of those that a process does: optimizer state is there by then, and DDP has settled its buckets."""
COMMUNICATION, PIPELINE = "communication", "pipeline"
Wait = tuple[float, float]
Outcome = TypeVar("Outcome")


def measured_number(run: RunSpec) -> int:
    """Which step after a start is the first whose memory and traffic are those of all that follow."""
    if run.layout.compress == "powersgd":
        return POWERSGD_FROM_STEP + 2
    return MEASURED_STEP + run.layout.static_graph  # of a static graph DDP settles its buckets a step later


class Closely:
    """Steps in place of a trainer's own, some of which are looked at closely.

    One of them is metered, which takes several times as long: what it holds, sends and computes is written to
    `measured/`. Of the others it is noted when everything was.
    """

    def __init__(self, trainer: Trainer, window: range) -> None:
        """`window` are steps that are still to be done."""
        self.trainer, self.window, self.offset = trainer, window, Offset()
        self.settled = trainer.step + measured_number(trainer.run)
        """The first step that is like all that follow."""
        self.metered = next((step for step in window if step >= self.settled), None)

    def __call__(self, batches: Iterator[Batch]) -> Record:
        trainer, number = self.trainer, self.trainer.step + 1
        if number not in self.window:
            return trainer.train_step(batches)
        if number == self.window[0]:  # clocks drift apart: not the offset of the run's start
            self.offset = clock_offset(trainer.device, trainer.run.training.timeout_seconds, f"step {number}")
        tokens, step = trainer.loads[0].clone(), partial(trainer.train_step, batches)
        if number == self.metered:
            record, seen = observed(trainer, step, over_time=True)
            write_measured(trainer.directory, trainer.mesh.rank, {"step": record["step"], **seen.measured})
        else:
            record, seen = timed(trainer.strategy, step)
        assert trainer.line is not None
        trainer.line |= seen.noted(self.offset)
        trainer.line["spans"] = passes_of(trainer.strategy)
        if trainer.moe_layers:
            trainer.line["expert_tokens"] = (trainer.loads[0] - tokens).long().tolist()
        return record | {"closely": True}


@dataclass
class Seen:
    """What a step did."""

    waits: dict[str, list[Wait]]
    """For what, and from when to when."""
    calls: list[Collective] = field(default_factory=list)
    held: Counter[str] = field(default_factory=Counter)
    """Bytes by part between the backward pass and the update."""
    peak: dict[str, int] = field(default_factory=dict)
    """The most of each part, and of all together."""
    flops: int = 0
    """Of forward and backward passes."""
    history: list[tuple[float, Mapping[str, int]]] = field(default_factory=list)
    """Bytes by part over time."""

    @property
    def measured(self) -> dict[str, Any]:
        """As `measured/` has it."""
        return {
            "held_bytes": dict(self.held),
            "peak_bytes": self.peak,
            "flops": self.flops,
            "collectives": summed(self.calls, self.waits[COMMUNICATION]),
        }

    def noted(self, offset: Offset) -> StepLine:
        """What a step's line has more for it."""
        line: dict[str, Any] = {
            "clock": (offset.seconds, offset.error_seconds),
            "waits": [(what, *wait) for what, waits in self.waits.items() for wait in waits],
            "collectives": [self._span(call) for call in self.calls],
        }
        return cast(StepLine, line | ({"memory": thinned(self.history)} if self.history else {}))

    def _span(self, call: Collective) -> CollectiveSpan:
        return {
            "operation": call.operation,
            "made_of": call.made_of,
            "group": list(call.group),
            "bytes": call.size_bytes,
            "began": call.begun,
            "ended": call.ended,
            "exposed": call.exposed(self.waits[COMMUNICATION]),
        }


def observed(learner: Learner, step: Callable[[], Outcome], over_time: bool = False) -> tuple[Outcome, Seen]:
    """A step's outcome, and all that it did; it takes several times as long. Memory is kept at its peak, or also
    `over_time`."""
    strategy, seen = learner.strategy, Seen({})
    memory = MemoryMeter(
        lambda: strategy.held(learner.optimizers), strategy.elastic(), seen.history if over_time else None
    )
    recorder, products = CollectiveRecorder(ASKED_FOR.get), FlopMeter()

    def reduce(sums: Tensor, clip_norm: float = 0.0) -> Reduced:
        seen.flops = products.flops
        reduced = type(strategy).reduce(strategy, sums, clip_norm)
        memory.look()
        seen.held.update(memory.held)
        return reduced

    strategy.reduce = reduce  # type: ignore[method-assign]
    try:
        gradients = memory.gradients_of(learner.module.parameters())
        with gradients, _waits_of(strategy) as seen.waits, memory, recorder, products:
            outcome = step()
    finally:
        del strategy.reduce
    seen.peak = {**memory.peaks, "working": memory.peak_working, "total": memory.peak_total}
    seen.calls = recorder.calls
    return outcome, seen


def timed(strategy: Strategy, step: Callable[[], Outcome]) -> tuple[Outcome, Seen]:
    """A step's outcome, and when its waits and collectives were."""
    with _waits_of(strategy) as waits, CollectiveRecorder(ASKED_FOR.get) as recorder:
        outcome = step()
    return outcome, Seen(waits, recorder.calls)


def measured_step(trainer: Trainer, batches: Iterator[Batch]) -> tuple[Record, dict[str, Any]]:
    """A step like any other, but slower, and what was measured in it."""
    record, seen = observed(trainer, partial(trainer.train_step, batches))
    return record, {"step": record["step"], **seen.measured}


def summed(calls: list[Collective], waits: list[Wait]) -> list[dict[str, Any]]:
    """The collectives of a step by operation, what did it, and group of ranks: bytes are of the operation asked for,
    `sent_bytes` what a rank sends for it around a ring."""
    rows: dict[tuple[str, str, tuple[int, ...]], dict[str, Any]] = defaultdict(
        lambda: {"calls": 0, "bytes": 0, "sent_bytes": 0.0, "seconds": 0.0, "exposed_seconds": 0.0}
    )
    for call in calls:
        row = rows[call.operation, call.made_of, call.group]
        row["calls"] += 1
        row["bytes"] += call.size_bytes
        row["sent_bytes"] += call.sent_bytes
        if call.ended is not None:
            row["seconds"] += call.ended - call.begun
            row["exposed_seconds"] += call.exposed(waits)
    return [
        {"operation": operation, "made_of": made_of, "group": list(group), **row}
        for (operation, made_of, group), row in sorted(rows.items())
    ]


@contextmanager
def _waits_of(strategy: Strategy) -> Iterator[dict[str, list[Wait]]]:
    kept = {COMMUNICATION: strategy.exposed, **strategy.waits_by_name}
    if strategy.waits is not None:
        kept[PIPELINE] = strategy.waits
    waits: dict[str, list[Wait]] = {}
    for what, waited in kept.items():
        waits[what] = waited.spans = []
    try:
        yield waits
    finally:
        for waited in kept.values():
            waited.spans = None
