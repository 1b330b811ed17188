"""What happened to a run between its steps: starts and failures, noted by whoever saw them."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

EVENTS_FILE = "events.jsonl"
"""In the run directory, a line each."""
BEGAN, FAILED, ENDED, ROLLED_BACK = "began", "failed", "ended", "rolled back"
"""Ranks began, after a step and so many; the first of them failed; all came to the last step, or were told to stop; the
run went back, and the same ranks begin again."""


def note(directory: Path, what: str, **facts: Any) -> None:
    """Add a line to a run's events."""
    line = json.dumps({"time": time.time(), "what": what, "host": socket.gethostname(), **facts})
    with suppress(OSError), (directory / EVENTS_FILE).open("ab+") as file:  # the disk may be what failed
        file.seek(-min(1, file.tell()), os.SEEK_END)
        whole = file.read() in (b"", b"\n")  # a full disk leaves half a line
        file.write((line if whole else "\n" + line).encode() + b"\n")


def seconds_until(events: Sequence[Mapping[str, Any]], what: str) -> float:
    """From a run's first event to the last of a kind, without the time between an end and the next start."""
    last = max((at for at, event in enumerate(events) if event["what"] == what), default=0)
    pairs = pairwise(events[: last + 1])
    return sum(float(after["time"] - before["time"]) for before, after in pairs if before["what"] != ENDED)


def failures_so_far(directory: Path) -> tuple[int, float]:
    """How often a run has broken off, whoever noticed, and the seconds that it was under way."""
    events = read_events(directory)
    orderly = ENDED, ROLLED_BACK
    broken = sum(after["what"] == BEGAN and before["what"] not in orderly for before, after in pairwise(events))
    if not events:
        return 0, 0.0
    what, when = events[-1]["what"], float(events[-1]["time"])
    under_way = 0.0 if what == ENDED else time.time() - when
    return broken + (what == FAILED), seconds_until(events, what) + under_way


def read_events(directory: Path) -> list[Mapping[str, Any]]:
    """What happened to a run, in order; half a line that a full disk left is passed over."""
    events, file = [], directory / EVENTS_FILE
    for line in file.read_text().splitlines() if file.exists() else []:
        with suppress(ValueError):
            events.append(json.loads(line))
    return events
