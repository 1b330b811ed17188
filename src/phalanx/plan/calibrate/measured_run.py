"""One run as a measurement for calibration; `report/measured_run.py` reads it from a run directory."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

from phalanx.cost.exact.rank_memory import RankMemory, rank_memory
from phalanx.plan.calibrate.microbenchmarks import CollectiveTiming
from phalanx.plan.search.oom_risk import device_and_host_bytes
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec

WARM_UP_STEPS = 2
"""Ignored steps at the start of a run: memory is new, and data-parallel buckets are not settled."""


MIN_STEPS = 3


MIN_WAIT_FRACTION = 0.03
"""Minimum waiting time, as a fraction of a step."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """One run and its measurements."""

    name: str
    run: RunSpec
    ranks: int
    step_seconds: float
    """Median time of a step."""
    memory_bytes: float
    """Peak memory of the process of rank 0."""
    peak_flops: float | None
    """Peak FLOP/s of a rank, measured or known when the run started."""
    tensor_bytes: float | None = None
    """Peak bytes of rank 0's tensors, if the run measured them (`--profile-memory`)."""
    computing_seconds: float = nan
    """Seconds per step in the slowest rank's passes, without waits; NaN if not recorded."""
    waiting_seconds: float = nan
    """Seconds per step that the rank that waits least waits for collectives; NaN if not recorded."""
    device: str | None = None
    """Device type, if the ranks recorded it."""
    exchanges: tuple[CollectiveTiming, ...] = ()
    """Collectives of profiled steps."""

    @property
    def memory(self) -> RankMemory:
        """Exact memory of rank 0."""
        return next(iter(rank_memory(ResolvedRun(self.run, self.ranks)).values()))

    @property
    def counted_peak_bytes(self) -> float:
        """Peak of the exact memory, including offloaded bytes on a CPU."""
        return device_and_host_bytes(self.run.cluster.replace(calibration=None), [self.memory])[0]
