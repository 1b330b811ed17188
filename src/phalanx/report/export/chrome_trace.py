"""Trace of a run's rank records for chrome://tracing and ui.perfetto.dev, on the clock of rank 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from phalanx.report.drawing.schedule import LEGEND
from phalanx.report.run_data import RunData
from phalanx.runs.jsonl import JsonRecord
from phalanx.runs.step_records import RankRecord
from phalanx.spec.formatting import WRITTEN_BY

Event = dict[str, Any]
LANES = ("steps", "passes", "waits", "collectives")
"""Lanes of each rank, from top to bottom. Simultaneous collectives have further lanes below."""


def chrome_trace(run_data: RunData) -> dict[str, Any]:
    """Return the trace in the Trace Event Format, in microseconds since the first event.

    `otherData` contains the error of the clocks.
    """
    events = [event for record in run_data.ranks.values() for event in _build_rank_events(record)]
    first_timestamp = min((event["ts"] for event in events if "ts" in event), default=0.0)
    shifted = [event | {"ts": event["ts"] - first_timestamp} if "ts" in event else event for event in events]
    errors = {str(rank): record.error_seconds for rank, record in run_data.ranks.items()}
    return {
        "comment": WRITTEN_BY,
        "displayTimeUnit": "ms",
        "otherData": {
            "run": run_data.name,
            "clock": "of rank 0",
            "clock_error_seconds": max(errors.values(), default=0.0),
            "clock_error_seconds_of_ranks": errors,
        },
        "traceEvents": shifted,
    }


def _build_rank_events(record: RankRecord) -> Iterator[Event]:
    yield _metadata_event(record.rank, "process_name", name=f"rank {record.rank} on {record.host}")
    yield _metadata_event(record.rank, "process_sort_index", sort_index=record.rank)
    events = [event for line in record.steps for event in _build_step_events(record, line)]
    for line in record.pauses:
        start = line["start"] + record.offset_seconds
        events.append(_complete_event(record.rank, 0, line["pause"], start, line["seconds"], step=line["step"]))
    for lane in sorted({event["tid"] for event in events if "tid" in event} | set(range(len(LANES)))):
        yield _metadata_event(record.rank, "thread_name", lane, name=LANES[min(lane, len(LANES) - 1)])
        yield _metadata_event(record.rank, "thread_sort_index", lane, sort_index=lane)
    yield from events


def _build_step_events(record: RankRecord, line: JsonRecord) -> Iterator[Event]:
    """Yield a step with its phases; for a profiled step also passes, waits, collectives and memory."""
    rank = record.rank
    step = line["step"]
    offset, error = line.get("clock", (record.offset_seconds, record.error_seconds))
    start = line["start"] + offset
    phases = line["seconds"]
    total_seconds = sum(phases.values())
    yield _complete_event(rank, 0, f"step {step}", start, total_seconds, step=step, clock_error_seconds=error)
    for phase, duration in phases.items():
        yield _complete_event(rank, 0, phase, start, duration, step=step)
        start += duration
    for kind, stage, micro, a, b in line.get("spans", ()):
        args = {"kind": LEGEND.get(kind, kind), "stage": stage, "micro_batch": micro}
        yield _complete_event(rank, 1, f"{stage}{kind}{micro}", a + offset, b - a, **args)
    for wait, a, b in line.get("waits", ()):
        yield _complete_event(rank, 2, wait, a + offset, b - a)
    for lane, call in _assign_lanes(call for call in line.get("collectives", ()) if call["end"] is not None):
        args = {name: call[name] for name in ("group", "bytes", "exposed", "executed_as")}
        seconds = call["end"] - call["start"]
        yield _complete_event(rank, 3 + lane, call["operation"], call["start"] + offset, seconds, **args)
    for sample in line.get("memory", ()):
        bytes_by_part = {part: size for part, size in sample.items() if part != "at"}
        yield {"ph": "C", "name": "memory", "pid": rank, "ts": 1e6 * (sample["at"] + offset), "args": bytes_by_part}


def _assign_lanes(calls: Iterable[JsonRecord]) -> Iterator[tuple[int, JsonRecord]]:
    """Yield each call with the first lane that is free at its start."""
    free_at: list[float] = []
    for call in sorted(calls, key=lambda call: float(call["start"])):
        lane = next((lane for lane, end in enumerate(free_at) if end <= call["start"]), len(free_at))
        free_at[lane : lane + 1] = [call["end"]]
        yield lane, call


def _complete_event(rank: int, lane: int, name: str, start_seconds: float, seconds: float, **args: Any) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": LANES[min(lane, 3)],
        "pid": rank,
        "tid": lane,
        "ts": 1e6 * start_seconds,
        "dur": 1e6 * seconds,
        "args": args,
    }


def _metadata_event(rank: int, metadata: str, lane: int = 0, **args: Any) -> Event:
    return {"ph": "M", "name": metadata, "pid": rank, "tid": lane, "args": args}
