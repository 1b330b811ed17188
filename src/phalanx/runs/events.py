"""Events of a run between its steps, such as starts and failures, appended by launchers and ranks."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from phalanx.runs.decode import Count, Rank, WorldSize, accept_old_keys, union_decoder
from phalanx.runs.jsonl import read_valid_jsonl
from phalanx.spec.files.replace import open_no_link

EVENTS_FILE = "events.jsonl"
"""The file in the run directory with one event per line."""
STARTED = "started"
FAILED = "failed"
FINISHED = "finished"
ROLLED_BACK = "rolled_back"
"""Kinds of lifecycle events.

`started`: ranks started after a step, with their number. `failed`: the first rank failed. `finished`: all ranks reached
the last step or a requested stop. `rolled_back`: the run returned to an earlier step and the same ranks restart.
"""
LIFECYCLE_EVENTS = (STARTED, FAILED, FINISHED, ROLLED_BACK)
"""The kinds of events that determine whether ranks are running."""
QUARANTINED = "checkpoint_quarantined"
"""A damaged checkpoint was quarantined."""
UPLOAD_FAILED = "checkpoint_upload_failed"
"""A checkpoint could not be uploaded to its object store, and remains in the run directory."""
RANK_DROPPED = "rank_dropped"
"""The run continues without a rank that failed repeatedly."""
Timestamp = Annotated[int | float, Field(allow_inf_nan=False, ge=0, le=4e9)]
"""Seconds since 1970. A later time than the year 2096 is damage, and may not be a date."""


@with_config(ConfigDict(extra="allow"))
class Event(TypedDict):
    """The fields of every event."""

    time: Timestamp
    kind: str


class Started(Event):
    """All ranks of a start are ready."""

    ranks: WorldSize
    step: Count
    host: NotRequired[str]
    launcher: NotRequired[int]
    alive_until: NotRequired[Timestamp | None]
    settings: NotRequired[dict[str, Any]]
    """`RunSpec.settings`, unless they are those of the start before."""


class Failed(Event):
    """The first rank has failed."""

    rank: Rank
    step: Count
    reason: str
    verdict: NotRequired[list[str]]
    """Lines of the diagnosis."""
    local: NotRequired[bool]
    """True if the failure began on this node."""


class Finished(Event):
    """All ranks have reached the last step or a requested stop."""

    step: Count
    reason: NotRequired[str]
    """Why the run ended before the steps that were planned."""


class RolledBack(Event):
    """The run has returned to an earlier step."""

    after: Count
    to: Count
    reason: str


class Quarantined(Event):
    """A damaged checkpoint was quarantined."""

    checkpoint: str
    problem: str


class UploadFailed(Event):
    """A checkpoint could not be uploaded."""

    checkpoint: str
    problem: str


_EVENT_TYPES: dict[str, Any] = {
    STARTED: Started,
    FAILED: Failed,
    FINISHED: Finished,
    ROLLED_BACK: RolledBack,
    QUARANTINED: Quarantined,
    UPLOAD_FAILED: UploadFailed,
}
decode_event = accept_old_keys(union_decoder("kind", _EVENT_TYPES, Event), {"what": "kind", "here": "local"})
"""Decode a line of events.jsonl."""


def append_event(directory: Path, event_type: str, **fields: Any) -> None:
    """Append an event to a run's event file; `fields` are those of its kind, such as `Failed`."""
    record = json.dumps({"time": time.time(), "kind": event_type, "host": socket.gethostname(), **fields})
    # The disk may have failed; on a full one the last line may be incomplete.
    with suppress(OSError), open(directory / EVENTS_FILE, "ab+", opener=open_no_link) as file:
        file.seek(-min(1, file.tell()), os.SEEK_END)
        ends_with_newline = file.read() in (b"", b"\n")
        file.write((record if ends_with_newline else "\n" + record).encode() + b"\n")


def mtime_or_none(file: Path) -> float | None:
    """Return the modification time of a file, or None if it does not exist."""
    with suppress(OSError):
        return file.stat().st_mtime
    return None


def active_seconds_until(events: Sequence[Mapping[str, Any]], event_type: str) -> float:
    """Return the active seconds from a run's first event to the last event of a kind.

    Two times are excluded: from an end to the next start, and from the last sign of life (`alive_until`) to a start by
    another launcher.
    """
    last_index = max((index for index, event in enumerate(events) if event["kind"] == event_type), default=0)
    total = 0.0
    launcher = None
    for before, after in pairwise(events[: last_index + 1]):
        launcher = _launcher_id(before) if before["kind"] == STARTED else launcher
        end = float(after["time"])
        if after["kind"] == STARTED and after.get("alive_until") is not None and _launcher_id(after) != launcher:
            end = min(end, float(after["alive_until"]))
        if before["kind"] != FINISHED:
            total += max(0.0, end - float(before["time"]))
    return total


def _launcher_id(start_event: Mapping[str, Any]) -> tuple[Any, Any]:
    return start_event.get("host"), start_event.get("launcher")


def failure_count_and_uptime(directory: Path) -> tuple[int, float]:
    """Return how often a run has failed and how many seconds it was active.

    The count includes failures that only a repeated start reveals (no event between two starts), and never
    decreases.
    """
    events = read_events(directory)
    if not events:
        return 0, 0.0
    event_types = [event["kind"] for event in events if event["kind"] in LIFECYCLE_EVENTS]
    failures = len(describe_failures(events, exclude_last=False))
    failures += sum(after == STARTED == before for before, after in pairwise(event_types))
    seconds = active_seconds_until(events, events[-1]["kind"])
    if event_types[-1:] != [FINISHED]:
        seconds += time.time() - float(events[-1]["time"])
    return failures, seconds


def describe_failures(events: Sequence[Mapping[str, Any]], exclude_last: bool) -> list[str]:
    """Return a line on each failure of a run: time, rank, reason, and verdict of the diagnosis.

    With `exclude_last`, the last failure is omitted if the run has not started since.
    """
    starts_and_failures = [event for event in events if event["kind"] in (STARTED, FAILED)]
    failures: list[Mapping[str, Any]] = []
    for before, event in pairwise([{"kind": STARTED}, *starts_and_failures]):
        if event["kind"] != FAILED:
            continue
        # Several nodes may record one failure, but it is local to only one of them.
        if before["kind"] == FAILED and not (_is_local_failure(before) and _is_local_failure(event)):
            failures[-1] = max(failures[-1], event, key=_is_local_failure)
        else:
            failures.append(event)
    if exclude_last and starts_and_failures and starts_and_failures[-1]["kind"] == FAILED:
        failures.pop()
    lines = []
    for event in failures:
        failure = f"{_format_time(event)}: rank {event['rank']} {event['reason']}, step {event['step']}"
        verdict = [line for line in event.get("verdict", []) if not line.startswith("details: ")]
        lines.append("; ".join([failure, *verdict]))
    return lines


def _is_local_failure(failure: Mapping[str, Any]) -> bool:
    """Return whether the node on which a failure began has recorded it."""
    return bool(failure.get("local", True))


def describe_rollbacks(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line on each rollback of a run: time, reason, and the steps before and after."""
    return [
        f"{_format_time(event)}: {event['reason']}; from step {event['after']} to step {event['to']}"
        for event in events
        if event["kind"] == ROLLED_BACK
    ]


def describe_damaged_checkpoints(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line on each quarantined checkpoint: time and damage."""
    return [
        f"{_format_time(event)}: {event['checkpoint']} was damaged and quarantined: {event['problem']}"
        for event in events
        if event["kind"] == QUARANTINED
    ]


def describe_failed_uploads(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line on each failed upload of a checkpoint: time and problem."""
    return [
        f"{_format_time(event)}: {event['checkpoint']} was not uploaded: {event['problem']}"
        for event in events
        if event["kind"] == UPLOAD_FAILED
    ]


def _format_time(event: Mapping[str, Any]) -> str:
    return datetime.fromtimestamp(event["time"]).strftime("%Y-%m-%d %H:%M:%S")


def skipped_steps(events: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Return how many steps of text a run skips after which of its steps, because of rollbacks.

    They are the steps of the rollbacks to a step, and those that were skipped after later steps, which the rollbacks
    abandoned. A start at an earlier step abandons them too."""
    skipped: dict[int, int] = {}
    for event in events:
        if event["kind"] == ROLLED_BACK:
            abandoned = sum(skipped.pop(later) for later in list(skipped) if later > event["to"])
            skipped[event["to"]] = skipped.get(event["to"], 0) + event["after"] - event["to"] + abandoned
        elif event["kind"] == STARTED:
            skipped = {step: steps for step, steps in skipped.items() if step <= event["step"]}
    return skipped


def changed_settings(directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the `settings` of a start's event, without the field if the last start that has it has the same ones."""
    recorded = next((event["settings"] for event in reversed(read_events(directory)) if "settings" in event), None)
    return {} if recorded == settings else {"settings": settings}


def read_events(directory: Path, problems: list[str] | None = None) -> list[Mapping[str, Any]]:
    """Return the events of a run, in order. Damaged lines, as after a full disk, are added to `problems`."""
    file = directory / EVENTS_FILE
    if not file.exists() and not file.is_symlink():
        return []
    return read_valid_jsonl(file, [] if problems is None else problems, decode_event)
