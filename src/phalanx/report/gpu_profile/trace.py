"""Reader of the Chrome traces that torch.profiler writes.

Format: libkineto/src/output_json.cpp of pytorch/kineto. Events of a GPU and calls of CUDA that caused them have the
same number `correlation`. Times are in microseconds, on one clock for the host and the GPU.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.report.gpu_profile.intervals import Interval

KERNEL = "kernel"
MEMORY_CATEGORIES = ("gpu_memcpy", "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")
ANNOTATION = "user_annotation"


@dataclass(frozen=True, kw_only=True)
class GpuEvent:
    """A kernel, copy or memset on the GPU. Times are in seconds."""

    name: str
    category: str
    start: float
    end: float
    launched_at: float | None
    """End of the host's call that launched it, or None if the trace does not have the call."""
    args: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class GpuTrace:
    """Events of the GPU, and annotations of the host. Times are in seconds since the first event."""

    events: Sequence[GpuEvent]
    """Events in the order of their starts."""
    annotations: Mapping[str, Interval]
    """The last interval of each `torch.profiler.record_function` on the host, by name."""


def read_gpu_trace(file: Path) -> GpuTrace:
    """Read a trace that is compressed with gzip."""
    with gzip.open(file, "rt", encoding="utf-8", errors="replace") as opened:
        return parse_gpu_trace(json.load(opened)["traceEvents"])


def parse_gpu_trace(trace_events: Sequence[Mapping[str, Any]]) -> GpuTrace:
    """Return the GPU's events and the host's annotations of the `traceEvents` of a trace."""
    complete = [event for event in trace_events if event.get("ph") == "X" and "cat" in event]
    origin = min((event["ts"] for event in complete), default=0.0)

    def interval(event: Mapping[str, Any]) -> Interval:
        start = (event["ts"] - origin) / 1e6
        return start, start + event.get("dur", 0.0) / 1e6

    launch_ends: dict[int, float] = {}
    for event in complete:
        correlation = event.get("args", {}).get("correlation")
        if event["cat"] in LAUNCH_CATEGORIES and correlation is not None:
            launch_ends[correlation] = max(interval(event)[1], launch_ends.get(correlation, 0.0))
    events = []
    for event in complete:
        if event["cat"] == KERNEL or event["cat"] in MEMORY_CATEGORIES:
            start, end = interval(event)
            args = event.get("args", {})
            launched_at = launch_ends.get(args.get("correlation"))
            events.append(
                GpuEvent(
                    name=event["name"], category=event["cat"], start=start, end=end, launched_at=launched_at, args=args
                )
            )
    return GpuTrace(
        events=sorted(events, key=lambda event: event.start),
        annotations={event["name"]: interval(event) for event in complete if event["cat"] == ANNOTATION},
    )
