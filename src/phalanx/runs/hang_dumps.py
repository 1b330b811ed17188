"""What ranks leave behind when a run stands still or breaks off, in the run directory.

RUN_DIR/hangs/rank-00000.json       of each rank that still could: where it stood, and its last collectives
RUN_DIR/hangs/rank-00000.fault      where it stood when a signal killed it (SIGABRT, SIGSEGV, ...), by faulthandler
RUN_DIR/hangs/rank-00000.calls      every collective that it called, with PHALANX_CHECK_COLLECTIVES
RUN_DIR/failures/rank-00000.json    why a rank failed
RUN_DIR/failures/earlier/           the same of earlier starts, with the time in the name"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from phalanx.runs.host import host_name

HANGS_DIR = "hangs"
FAILURES_DIR = "failures"
EARLIER_DIR = "earlier"
FORMAT = 1
STALLED = "nothing moved"
FAILED = "it failed"
ABORTED = "it was aborted"
"""Why a rank left word."""

FATAL = "Fatal Python error: "
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
"""As faulthandler writes them."""

Frame = tuple[str, int, str]
"""Of a stack: file, line, function."""


def format_frame(frame: Sequence[Any] | None) -> str:
    """ "trainer.py:83 (reduce)", with the folder that it is in."""
    return "an unknown line" if not frame else f"{'/'.join(str(frame[0]).split('/')[-2:])}:{frame[1]} ({frame[2]})"


class RecordedCollective(TypedDict):
    """One collective that a rank called."""

    group: str
    number: int
    """Which of the group's collectives, from 1: on every rank the same one has the same number."""
    operation: str
    inputs: list[list[int]]
    outputs: list[list[int]]
    dtypes: list[str]
    """Of the inputs."""
    over: bool
    """Whether it had ended."""
    at: Frame | None
    """Who called it."""


class HangDump(TypedDict):
    """What a rank tells of itself and of its neighbours."""

    format: int
    rank: int
    ranks: int
    host: str
    pid: int
    time: float
    step: int
    """The last that it had finished."""
    why: str
    stalled_seconds: float
    """How long nothing had moved."""
    error: NotRequired[str]
    """What it failed with then, or before that."""
    stack: list[Frame]
    """Of its main thread, innermost first; of an error, where that was raised."""
    waiting: bool
    """Whether it waited for others there."""
    groups: dict[str, list[int]]
    calls: list[RecordedCollective]
    """The last ones, oldest first."""
    oom_kills: int
    """Processes of its group that the kernel killed for want of memory since it began."""
    sibling_states: dict[str, str]
    """Of the other ranks on this host: the state of their process in /proc, or "gone"."""


REQUIRED_DUMP_FIELDS = frozenset(HangDump.__annotations__) - {"error"}
"""In every dump. (__required_keys__ takes NotRequired for required where annotations are put off.)"""


def dump_file(directory: Path, rank: int) -> Path:
    """Where a rank tells where it stood."""
    return directory / HANGS_DIR / f"rank-{rank:05d}.json"


def fault_file(directory: Path, rank: int) -> Path:
    """Where faulthandler writes, of a rank that a signal ends."""
    return directory / HANGS_DIR / f"rank-{rank:05d}.fault"


def calls_file(directory: Path, rank: int) -> Path:
    """Where a rank logs its collectives (`debug.collective_order`)."""
    return directory / HANGS_DIR / f"rank-{rank:05d}.calls"


def describe_fault(directory: Path, rank: int) -> str | None:
    """Of a rank that a signal ended: "Segmentation fault in train/worker.py:12 (work)", as far as faulthandler wrote
    it; None where it wrote nothing."""
    try:
        lines = fault_file(directory, rank).read_text(errors="replace").splitlines()
    except OSError:
        return None
    message = next((line.removeprefix(FATAL) for line in lines if line.startswith(FATAL)), None)
    start = next((index for index, line in enumerate(lines) if line.startswith("Current thread")), len(lines))
    frame_match = next(filter(None, map(_FRAME.fullmatch, lines[start + 1 :])), None)
    if message is None or frame_match is None:
        return message
    return f"{message} in {format_frame(frame_match.groups())}"


def failure_file(directory: Path, rank: int) -> Path:
    """Where a rank, or whoever started it, tells why it failed."""
    return directory / FAILURES_DIR / f"rank-{rank:05d}.json"


def write_dump(directory: Path, dump: HangDump) -> None:
    """Leave what a rank tells of where it stood."""
    _write_atomically(dump_file(directory, dump["rank"]), json.dumps(dump))


def write_failure(directory: Path, record: Mapping[str, Any]) -> None:
    """Leave why a rank of this host failed."""
    _write_atomically(failure_file(directory, record["rank"]), json.dumps({"host": host_name(), **record}, indent=1))


def remove_dumps(directory: Path, rank: int) -> None:
    """Remove what a rank left of an earlier start; why it failed is kept in failures/earlier."""
    for file in (dump_file(directory, rank), calls_file(directory, rank)):
        file.unlink(missing_ok=True)
    _archive(failure_file(directory, rank))


def remove_dumps_from_rank(directory: Path, rank: int) -> None:
    """Remove what was left by this rank and those after it, of an earlier start that had them."""
    for folder in (HANGS_DIR, FAILURES_DIR):
        for file in (directory / folder).glob("rank-*"):
            if file.stem < f"rank-{rank:05d}":
                continue
            if folder == FAILURES_DIR and file.suffix == ".json":
                _archive(file)
            else:
                file.unlink(missing_ok=True)


def _archive(file: Path) -> None:
    """Move a failure record to where only people look, under the time it was written."""
    with suppress(FileNotFoundError):
        written_at = time.strftime("%Y%m%dT%H%M%S", time.localtime(file.stat().st_mtime))
        archive = file.parent / EARLIER_DIR
        archive.mkdir(exist_ok=True)
        file.replace(archive / f"{file.stem}-{written_at}.json")


def _write_atomically(file: Path, text: str) -> None:
    """Where others find it whole or not at all."""
    file.parent.mkdir(exist_ok=True)
    partial_file = file.with_suffix(".partial")
    partial_file.write_text(text)
    partial_file.replace(file)


def read_dumps(directory: Path) -> dict[int, HangDump]:
    """Of every rank that left one."""
    records = [
        record
        for record in _read_records(directory / HANGS_DIR)
        if record.keys() >= REQUIRED_DUMP_FIELDS and record["format"] == FORMAT
    ]
    return {int(record["rank"]): record for record in records}  # type: ignore[misc]


def read_failures(directory: Path) -> dict[int, dict[str, Any]]:
    """What every rank that failed, or whoever started it, wrote of that."""
    types = {"rank": int, "time": int | float, "reason": str}
    return {
        record["rank"]: dict(record)
        for record in _read_records(directory / FAILURES_DIR)
        if all(isinstance(record.get(key), type_) for key, type_ in types.items())
    }


def describe_first_failure(directory: Path) -> str | None:
    """Return the first failed rank and its reason, if any.

    A killed rank cannot write its own record. Its launcher writes one without the step, later than the ranks that lost
    the connection to it."""
    records = read_failures(directory).values()
    if not records:
        return None
    first = min(records, key=lambda record: ("step" in record, record["time"]))
    reason = (first["reason"].splitlines() or [""])[0]
    return f"rank {first['rank']} {'failed: ' if 'step' in first else ''}{reason}"


def _read_records(folder: Path) -> list[Mapping[str, Any]]:
    records = []
    for file in sorted(folder.glob("rank-*.json")):
        with suppress(ValueError, OSError):  # the disk may have been full
            records.append(json.loads(file.read_text()))
    return [record for record in records if isinstance(record, dict)]
