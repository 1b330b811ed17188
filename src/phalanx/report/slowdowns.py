"""Slow ranks: the time of each rank for equal work, and the step from which a series is higher."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.exact.flops import rank_flops
from phalanx.report.step_breakdown import StepTimes
from phalanx.spec.resolved_run import ResolvedRun

STRAGGLER_RATIO = 1 / 0.75
SLOW_ALONE = 1.6
"""Minimum slowdown of a straggler relative to its replicas, and to other stages, which differ anyway."""
MIN_SEGMENT = 3
"""Minimum number of steps before and after a change."""
IMBALANCE_RATIO = 1.15
"""Minimum ratio to the other ranks that is not chance."""


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """Time of a rank for equal work, relative to other ranks."""

    index: int
    """Index of the rank in `StepTimes.ranks`."""
    ratio: NDArray[np.float64]
    """Its time per FLOP, relative to the median of its peers, [steps]."""
    start: int
    """Index of the first slow step."""
    threshold: float
    """Minimum ratio of a straggler."""

    @property
    def factor(self) -> float:
        """The median ratio of the slow steps."""
        return float(np.median(self.ratio[self.start :]))

    @property
    def score(self) -> float:
        """The slowdown relative to its threshold; at least 1 for a straggler."""
        return self.factor / self.threshold


def measure_slowdowns(resolved: ResolvedRun, times: StepTimes) -> Iterator[Slowdown]:
    """Yield the slowdown of each rank that computes.

    Its peers are the replicas of its stages. A rank without replicas is compared with all others, and needs a
    higher ratio to count as slow, because stages differ.
    """
    # FLOPs of each rank's passes in a step, with balanced experts
    flops = np.array([rank_flops(resolved, rank) for rank in times.ranks])
    indices = [int(index) for index in np.flatnonzero(flops > 0)]
    if len(indices) < 2:
        return
    pipeline_ranks = [resolved.dims.coordinates(rank)["pp"] for rank in times.ranks]
    seconds_per_flop = times.compute / np.where(flops > 0, flops, np.inf)
    for index in indices:
        others = [peer for peer in indices if peer != index]
        replicas = [peer for peer in others if pipeline_ranks[peer] == pipeline_ranks[index]]
        ratio = seconds_per_flop[:, index] / np.median(seconds_per_flop[:, replicas or others], axis=1)
        yield Slowdown(
            index=index,
            ratio=ratio,
            start=change_point(np.log(ratio), float(np.log(IMBALANCE_RATIO))),
            threshold=STRAGGLER_RATIO if replicas else SLOW_ALONE,
        )


def change_point(series: NDArray[np.float64], min_increase: float) -> int:
    """Return the index from which a series is higher by at least `min_increase`, or 0 if it is not.

    The model is a single change of the mean, at the index with the least sum of squared residuals.
    """
    split_points = np.arange(MIN_SEGMENT, len(series) - MIN_SEGMENT + 1)
    if not len(split_points):
        return 0
    sums = np.concatenate([[0.0], np.cumsum(series - series.mean())])[split_points]
    before = sums / split_points
    after = -sums / (len(series) - split_points)  # relative to the mean of the series
    explained = np.where(after - before >= min_increase, -sums * (after - before), -np.inf)
    best = int(explained.argmax())
    return int(split_points[best]) if explained[best] > 0 else 0
