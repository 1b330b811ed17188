"""The source of each sequence of a run that mixes sources by weight.

Symbols: share s_i of source i, the common denominator D of all shares. Sequences of the run, and of each source, count
from 0. Among the first n sequences of the run, each source must have less than one more or less than n s_i. So it may
have its sequence j only if n s_i > j, and must have it if n s_i >= j + 1: sequence j of the source has a window of
positions in the run. Among the sources whose window is open, the one whose window ends first is next (earliest
deadline first). This keeps all windows, because sequences that flow at the constant rates s_i do (R. Tijdeman, The
chairman assignment problem, Discrete Mathematics 32, 1980; S. Baruah et al., Proportionate progress, Algorithmica 15,
1996). The simpler rule of the smallest (j + 1/2) / s_i is more than one sequence off for some shares of four sources.

After D sequences each source has exactly D s_i of them, because a whole number that is less than one off a whole number
is equal to it. The order therefore repeats with period D. One period is computed once; any sequence is then found
without the others, so that the position of a run is the number of its sequences, as without a mixture."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from phalanx.spec.mixture import common_denominator


class MixtureOrder:
    """Source and number within its source of each sequence of a run, for shares with a sum of 1."""

    def __init__(self, shares: Sequence[Fraction]) -> None:
        self.shares = list(shares)
        self.period = common_denominator(shares)
        counts = [int(share * self.period) for share in shares]
        self._counts = np.array(counts)
        self._sources = _order_one_period(counts)
        self._positions = [np.flatnonzero(self._sources == source) for source in range(len(counts))]
        self._indices = np.empty(self.period, np.int64)
        for count, positions in zip(counts, self._positions, strict=True):
            self._indices[positions] = np.arange(count)

    def locate(self, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each sequence of the run, and its number within this source (both from 0)."""
        periods, positions = np.divmod(sequences, self.period)
        sources = self._sources[positions]
        return sources, periods * self._counts[sources] + self._indices[positions]

    def sequence_of(self, source: int, index: int) -> int:
        """Return the sequence of the run that is number `index` of a source: the inverse of `locate`."""
        periods, index_in_period = divmod(index, int(self._counts[source]))
        return periods * self.period + int(self._positions[source][index_in_period])

    def count(self, source: int, sequences: int) -> int:
        """Return how many of the first `sequences` of the run are of a source."""
        periods, positions = divmod(sequences, self.period)
        return periods * int(self._counts[source]) + int(np.searchsorted(self._positions[source], positions))


def _order_one_period(counts: Sequence[int]) -> np.ndarray:
    """Return the sources of one period, in which source i has `counts[i]` sequences: earliest deadline first.

    The window of sequence j of a source is from position floor(j D / count) to before ceil((j + 1) D / count)."""
    period = sum(counts)
    sources = np.empty(period, np.int16)
    placed = [0] * len(counts)
    eligible = [(-(-period // count), source) for source, count in enumerate(counts) if count]
    heapq.heapify(eligible)
    waiting: list[tuple[int, int]] = []
    for position in range(period):
        while waiting and waiting[0][0] <= position:
            _, source = heapq.heappop(waiting)
            heapq.heappush(eligible, (-(-(placed[source] + 1) * period // counts[source]), source))
        _, source = heapq.heappop(eligible)
        sources[position] = source
        placed[source] += 1
        heapq.heappush(waiting, (placed[source] * period // counts[source], source))
    return sources
