"""One run as a measurement for the calibration (`report/measured_run.py` reads it from a run directory)."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

from phalanx.cost.exact.rank_memory import RankMemory, rank_memory
from phalanx.plan.calibrate.microbenchmarks import CollectiveTiming
from phalanx.plan.search.oom_risk import device_and_host_bytes
from phalanx.spec.run import RunSpec

WARM_UP_STEPS = 2
"""Steps at the start of a run that do not count: memory is new, and data-parallel buckets are not settled."""


MIN_STEPS = 3


MIN_WAIT_FRACTION = 0.03
"""Of a step."""


@dataclass(frozen=True)
class MeasuredRun:
    """One run, and what it took."""

    name: str
    run: RunSpec
    ranks: int
    step_seconds: float
    """Median."""
    memory_bytes: float
    """The most that the process of rank 0 held."""
    peak_flops: float | None
    """Of a rank, as it was measured or known when the run began."""
    tensor_bytes: float | None = None
    """The most that tensors of rank 0 held at one time, where the run measured that (`--profile-memory`)."""
    computing_seconds: float = nan
    """Of a step the slowest rank's passes without waits for others, where ranks noted that; NaN if they did not."""
    waiting_seconds: float = nan
    """Of a step, for collectives, of the rank that waits least, likewise."""
    device: str | None = None
    """What it ran on, where its ranks noted that."""
    exchanges: tuple[CollectiveTiming, ...] = ()
    """Collectives of steps that were looked at closely."""

    @property
    def memory(self) -> RankMemory:
        """Counted of its tensors, on rank 0."""
        return next(iter(rank_memory(self.run, self.ranks).values()))

    @property
    def counted_peak_bytes(self) -> float:
        """The most of these at one time, with what it offloads on a CPU."""
        return device_and_host_bytes(self.run.cluster.model_copy(update={"calibration": None}), [self.memory])[0]
