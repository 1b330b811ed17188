"""Records that ranks write to the run directory when a run hangs or fails.

RUN_DIR/hangs/rank-00000.json       stack and last collectives of a rank that could still write them
RUN_DIR/hangs/rank-00000.fault      stack of a rank that a signal killed (SIGABRT, SIGSEGV, ...), by faulthandler
RUN_DIR/hangs/rank-00000.calls      every collective call of a rank, with PHALANX_CHECK_COLLECTIVES
RUN_DIR/failures/rank-00000.json    why a rank failed
RUN_DIR/failures/rank-00000.pickle  GPU allocations of a rank that ran out of memory, for pytorch.org/memory_viz
RUN_DIR/failures/earlier/           failure records of earlier starts, with the time in the name
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, NotRequired, TypeVar

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from phalanx.runs.decode import (
    Amount,
    Count,
    Decode,
    Index,
    Number,
    Rank,
    WorldSize,
    decoder,
    read_bytes,
    read_json,
    unreadable_file,
)
from phalanx.runs.host import host_name
from phalanx.spec.files.replace import replace_file

HANGS_DIR = "hangs"
FAILURES_DIR = "failures"
EARLIER_DIR = "earlier"
FORMAT: Final = 1
STALLED = "nothing moved"
FAILED = "it failed"
ABORTED = "it was aborted"
"""Reasons for which a rank writes a hang dump."""

FATAL = "Fatal Python error: "
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
"""The format of a stack frame in faulthandler's output."""

Frame = tuple[str, int, str]
"""A stack frame: file, line, function."""


def format_frame(frame: Sequence[Any] | None) -> str:
    """Return a stack frame as text, such as "train/trainer.py:83 (reduce)", with one parent folder."""
    return "an unknown line" if not frame else f"{'/'.join(str(frame[0]).split('/')[-2:])}:{frame[1]} ({frame[2]})"


class RecordedCollective(TypedDict):
    """One collective that a rank called."""

    group: str
    number: Count
    """Index of the collective within its group, from 1; equal on every rank for the same collective."""
    operation: str
    inputs: list[list[int]]
    outputs: list[list[int]]
    dtypes: list[str]
    """Data types of the inputs."""
    over: bool
    """True if the collective had finished."""
    at: Frame | None
    """The line that called the collective."""


class HangDump(TypedDict):
    """State of a rank and of the other ranks on its host when the run hung or failed."""

    format: Literal[1]
    """The value of `FORMAT`."""
    rank: Rank
    ranks: WorldSize
    host: str
    pid: Count
    time: Number
    step: Count
    """The last step that the rank had finished."""
    why: str
    stalled_seconds: Amount
    """Seconds without progress."""
    error: NotRequired[str]
    """The error of the rank at this time or earlier."""
    stack: list[Frame]
    """Stack of the main thread, or of the error if there is one, innermost frame first."""
    waiting: bool
    """True if the rank waited for others at the top of this stack."""
    groups: dict[str, list[Rank]]
    calls: list[RecordedCollective]
    """The last collectives, oldest first."""
    oom_kills: int
    """Number of processes in the rank's cgroup that the OOM killer has killed since the rank started."""
    sibling_states: dict[Index, str]
    """The process state of each other rank on this host, from /proc, or "gone"."""


@with_config(ConfigDict(extra="allow"))
class FailureRecord(TypedDict):
    """Record of a failed rank, by itself or its launcher."""

    rank: Rank
    time: Number
    reason: str
    step: NotRequired[Count]
    """The last step that the rank had finished, if the rank wrote the record."""
    code: NotRequired[int]
    """The exit code."""
    error: NotRequired[dict[str, Any]]
    """The error, if the user can fix it (`UserError.to_record`)."""
    final: NotRequired[bool]
    """True if the failure would recur."""
    traceback: NotRequired[str]
    suspect_ranks: NotRequired[list[Rank]]
    out_of_memory: NotRequired[bool]
    storage: NotRequired[bool]
    host: NotRequired[str]


_decode_dump_fields: Decode[HangDump] = decoder(HangDump)
_decode_failure: Decode[FailureRecord] = decoder(FailureRecord)


def dump_file(directory: Path, rank: int) -> Path:
    """Return the path of a rank's hang dump."""
    return directory / HANGS_DIR / f"rank-{rank:05d}.json"


def fault_file(directory: Path, rank: int) -> Path:
    """Return the path of faulthandler's output for a rank that a signal kills."""
    return directory / HANGS_DIR / f"rank-{rank:05d}.fault"


def calls_file(directory: Path, rank: int) -> Path:
    """Return the path of a rank's log of collectives (`debug.collective_order`)."""
    return directory / HANGS_DIR / f"rank-{rank:05d}.calls"


def describe_fault(directory: Path, rank: int) -> str | None:
    """Return the fatal error and line of a rank that a signal killed, or None without a record.

    Example: "Segmentation fault in train/worker.py:12 (work)".
    """
    try:
        lines = read_bytes(fault_file(directory, rank)).decode(errors="replace").splitlines()
    except OSError:
        return None
    message = next((line.removeprefix(FATAL) for line in lines if line.startswith(FATAL)), None)
    start = next((index for index, line in enumerate(lines) if line.startswith("Current thread")), len(lines))
    frame_match = next(filter(None, map(_FRAME.fullmatch, lines[start + 1 :])), None)
    if message is None or frame_match is None:
        return message
    return f"{message} in {format_frame(frame_match.groups())}"


def failure_file(directory: Path, rank: int) -> Path:
    """Return the path of a rank's failure record, which the rank or its launcher writes."""
    return directory / FAILURES_DIR / f"rank-{rank:05d}.json"


def memory_snapshot_file(directory: Path, rank: int) -> Path:
    """Return the path of the GPU allocations of a rank that ran out of memory (`metrics.allocation_history`)."""
    return failure_file(directory, rank).with_suffix(".pickle")


def write_dump(directory: Path, dump: HangDump) -> None:
    """Write the hang dump of a rank."""
    _write_atomically(dump_file(directory, dump["rank"]), json.dumps(dump))


def write_failure(directory: Path, record: Mapping[str, Any]) -> None:
    """Write the failure record of a rank of this host."""
    _write_atomically(failure_file(directory, record["rank"]), json.dumps({"host": host_name(), **record}, indent=1))


def remove_dumps(directory: Path, rank: int) -> None:
    """Remove the hang dump of a rank's earlier start, and move its failure record to failures/earlier."""
    for file in (dump_file(directory, rank), calls_file(directory, rank)):
        file.unlink(missing_ok=True)
    _archive_failure_file(failure_file(directory, rank))
    _archive_failure_file(memory_snapshot_file(directory, rank))


def remove_dumps_from_rank(directory: Path, rank: int) -> None:
    """Remove the dumps of earlier starts for this rank and all higher ranks."""
    for folder in (HANGS_DIR, FAILURES_DIR):
        for file in (directory / folder).glob("rank-*"):
            if file.stem < f"rank-{rank:05d}":
                continue
            if folder == FAILURES_DIR and file.suffix in (".json", ".pickle"):
                _archive_failure_file(file)
            else:
                file.unlink(missing_ok=True)


def _archive_failure_file(file: Path) -> None:
    """Move a failure record or snapshot to failures/earlier, with the time of writing in its name."""
    with suppress(FileNotFoundError):
        written_at = time.strftime("%Y%m%dT%H%M%S", time.localtime(file.stat().st_mtime))
        archive = file.parent / EARLIER_DIR
        archive.mkdir(exist_ok=True)
        file.replace(archive / f"{file.stem}-{written_at}{file.suffix}")


def _write_atomically(file: Path, text: str) -> None:
    """Write a file in a folder that may not exist yet."""
    file.parent.mkdir(exist_ok=True)
    replace_file(file, text)


def read_dumps(directory: Path, problems: list[str] | None = None) -> dict[int, HangDump]:
    """Return the hang dumps in a run directory by rank. Damaged files are added to `problems`."""
    return _read_records(directory / HANGS_DIR, _decode_dump, problems)


def _decode_dump(content: bytes) -> HangDump:
    """Decode a dump; one that names ranks beyond its number of ranks is damaged."""
    dump: HangDump = _decode_dump_fields(content)
    members = [rank for ranks in dump["groups"].values() for rank in ranks]
    if max([dump["rank"], *members, *map(int, dump["sibling_states"])]) >= dump["ranks"]:
        raise ValueError("a rank is not below the number of ranks")
    return dump


def read_failures(directory: Path, problems: list[str] | None = None) -> dict[int, dict[str, Any]]:
    """Return the failure records in a run directory by rank. Damaged files are added to `problems`."""
    records = _read_records(directory / FAILURES_DIR, _decode_failure, problems)
    return {rank: {"code": 1, **record} for rank, record in records.items()}


def describe_first_failure(directory: Path, problems: list[str] | None = None) -> str | None:
    """Return the rank that failed first and its reason, or None. Damaged records are added to `problems`.

    A killed rank cannot write its own record. Its launcher writes one without the step, later than the ranks that lost
    the connection to it.
    """
    records = read_failures(directory, problems).values()
    if not records:
        return None
    first_failure = min(records, key=lambda record: ("step" in record, record["time"]))
    reason = (first_failure["reason"].splitlines() or [""])[0]
    return f"rank {first_failure['rank']} {'failed: ' if 'step' in first_failure else ''}{reason}"


R = TypeVar("R", HangDump, FailureRecord)


def _read_records(folder: Path, decode: Decode[R], problems: list[str] | None) -> dict[int, R]:
    """Return the record in each rank's file. A record of another rank than its file's name is damaged."""
    records: dict[int, R] = {}
    for file in sorted(folder.glob("rank-*.json")):
        with suppress(ValueError, OSError):  # the disk may have been full
            record = read_json(file, decode)
            if file.stem == f"rank-{record['rank']:05d}":
                records[record["rank"]] = record
                continue
        if problems is not None:
            problems.append(unreadable_file(file))
    return records
