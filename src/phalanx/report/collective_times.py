"""How long collectives took once all of their ranks were there, of steps that were looked at closely."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from phalanx.plan.calibrate.microbenchmarks import CollectiveTiming
from phalanx.report.run_data import RunData
from phalanx.runs.jsonl import JsonRecord

MIN_EXPOSED_FRACTION = 0.9
"""Of a collective's time, where nothing ran beside it: what does takes longer for it on a CPU, and may have stood in a
queue."""
Kind = tuple[str, tuple[int, ...], int]
"""Operation, group, bytes."""


def collective_times(run_data: RunData) -> tuple[CollectiveTiming, ...]:
    """Of each operation, group and size the median over calls of what it took the rank that came last. Those that some
    rank did not wait for from the first moment to the last are left out, and steps in which memory was watched."""
    calls: dict[tuple[Kind, int, int], list[float | None]] = defaultdict(list)
    for record in run_data.ranks.values():
        for line in record.steps:
            if "memory" not in line:
                occurrences: dict[Kind, int] = defaultdict(int)
                for call in line.get("collectives", ()):
                    kind = call["operation"], tuple(call["group"]), call["bytes"]
                    calls[kind, line["step"], occurrences[kind]].append(_blocking_seconds(call))
                    occurrences[kind] += 1
    durations: dict[Kind, list[float]] = defaultdict(list)
    for (kind, _, _), per_rank in calls.items():
        known = [seconds for seconds in per_rank if seconds is not None]
        if len(known) == len(kind[1]) > 1:
            durations[kind].append(min(known))
    return tuple(
        CollectiveTiming(operation, len(group), group[1] - group[0], size_bytes=size_bytes, seconds=median(samples))
        for (operation, group, size_bytes), samples in sorted(durations.items())
    )


def _blocking_seconds(call: JsonRecord) -> float | None:
    """Seconds of a collective that a rank stood still for; None of one that it did not, or whose end nobody knows."""
    if call["end"] is None:
        return None
    seconds = call["end"] - call["start"]
    return seconds if 0 < MIN_EXPOSED_FRACTION * seconds <= call["exposed"] else None
