"""Durations of collectives after the arrival of all of their ranks, from profiled steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from statistics import median

from phalanx.plan.calibrate.microbenchmarks import CollectiveTiming
from phalanx.report.run_data import RunData

MIN_EXPOSED_FRACTION = 0.9
"""Minimum share of a collective's time in which its rank waits for it.

A collective that overlaps with compute takes longer on a CPU, and may have waited in a queue.
"""
Kind = tuple[str, tuple[int, ...], int]
"""Operation, group, bytes."""
Call = tuple[Kind, int, int]
"""Kind, step, and number of earlier calls of this kind in the step: equal on all ranks of a collective."""


def collective_times(run_data: RunData) -> tuple[CollectiveTiming, ...]:
    """Return the median time of each operation, group and size on the last rank to arrive.

    Calls that a rank did not wait for from start to end are excluded, and so are steps with memory samples.
    """
    seconds_per_rank: dict[Call, list[float | None]] = defaultdict(list)
    for record in run_data.ranks.values():
        for line in record.steps:
            if "memory" in line:
                continue
            occurrences: Counter[Kind] = Counter()
            for call in line.get("collectives", ()):
                kind = call["operation"], tuple(call["group"]), call["bytes"]
                seconds = 0.0 if call["end"] is None else call["end"] - call["start"]
                is_blocking = 0 < MIN_EXPOSED_FRACTION * seconds <= call["exposed"]
                same_call = kind, line["step"], occurrences[kind]
                seconds_per_rank[same_call].append(seconds if is_blocking else None)
                occurrences[kind] += 1
    durations: dict[Kind, list[float]] = defaultdict(list)
    for (kind, _, _), per_rank in seconds_per_rank.items():
        durations_on_ranks = [seconds for seconds in per_rank if seconds is not None]
        if len(durations_on_ranks) == len(kind[1]) > 1:
            durations[kind].append(min(durations_on_ranks))
    return tuple(
        CollectiveTiming(
            operation=operation,
            ranks=len(group),
            stride=group[1] - group[0],
            size_bytes=size_bytes,
            seconds=median(samples),
        )
        for (operation, group, size_bytes), samples in sorted(durations.items())
    )
