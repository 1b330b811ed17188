"""Work of a step that is counted repeatedly: collectives, FLOPs, and gradients that were added to sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from phalanx.parallel.data.zero import ZeRO
from phalanx.parallel.data.zero_parameters import OwnedParameter
from phalanx.parallel.strategy import Strategy
from phalanx.train.profiling.collective_recorder import CollectiveCall
from phalanx.train.profiling.step_profiler import StepRecorders


class _Mark(NamedTuple):
    """Counts of recorders, and of gradients in sums, at one time."""

    calls: int
    flops: int
    num_added: list[int]


@dataclass
class Work:
    """Additions of a micro-batch, or of a pass of it, to recorders and counters."""

    calls: list[CollectiveCall]
    flops: int
    num_added: list[int]


class RepeatedWork:
    """Recorders of a step, and the counters of the trainer's state that depend on the number of micro-batches."""

    def __init__(self, strategy: Strategy, recorders: StepRecorders | None) -> None:
        """Keep the recorders; `recorders` is None in a step that is not recorded."""
        self.recorders = recorders
        self._owned: list[OwnedParameter] = []
        if isinstance(strategy, ZeRO):
            self._owned = [owned for bucket in strategy.buckets for owned in bucket.parameters]

    def mark(self) -> _Mark:
        """Return the present counts."""
        num_added = [owned.num_added for owned in self._owned]
        if self.recorders is None:
            return _Mark(0, 0, num_added)
        return _Mark(len(self.recorders.collectives.calls), self.recorders.flops.flops, num_added)

    def since(self, mark: _Mark) -> Work:
        """Return the work that was added since the mark."""
        mark_now = self.mark()
        calls = [] if self.recorders is None else self.recorders.collectives.calls[mark.calls :]
        added = [after - before for after, before in zip(mark_now.num_added, mark.num_added, strict=True)]
        return Work(calls, mark_now.flops - mark.flops, added)

    def repeat(self, work: Work, times: int = 1) -> None:
        """Add the work `times` times."""
        if self.recorders is not None:
            self.recorders.collectives.calls += times * work.calls
            self.recorders.flops.flops += times * work.flops
        for owned, added in zip(self._owned, work.num_added, strict=True):
            owned.num_added += times * added
