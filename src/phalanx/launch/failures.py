"""Failure records: written by ranks, read by the launcher, which finds and prints the first failure."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.debug.collective_log import is_peer_loss
from phalanx.debug.explain_run import failure_headline
from phalanx.debug.oom import describe_kill, format_oom_report
from phalanx.runs import hang_dumps
from phalanx.runs.checkpoints import CHECKPOINTS_DIR, checkpoints
from phalanx.runs.errors import DivergenceError
from phalanx.spec.errors import UserError

FATAL_EXIT_CODES = {
    -number for number in (signal.SIGKILL, signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV, signal.SIGILL)
}


class StorageError(UserError):
    """A disk or a file of this node that the next start would meet again."""


STORAGE_FIXES = {
    errno.ENOSPC: "free space on that disk, and continue with --resume",
    errno.EDQUOT: "free space there, or have the quota raised, and continue with --resume",
    errno.EROFS: "mount it writable, and continue with --resume",
    errno.ENOENT: "put it back, and continue with --resume",
    errno.EACCES: "check its permissions, and continue with --resume",
    errno.EPERM: "check its permissions, and continue with --resume",
}
"""Errors that the next start would meet again, and what helps."""


def as_user_error(error: BaseException, directory: Path) -> BaseException:
    """Return an error of storage with what the user can do, any other as it is. `directory` is where the run writes,
    for a full disk that does not say which file it was."""
    if not isinstance(error, OSError) or error.errno not in STORAGE_FIXES:
        return error
    is_about_disk = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
    if error.filename is None and not is_about_disk:  # no file: a process, or a socket
        return error
    field, path = ("file", error.filename) if error.filename else ("run directory", directory)
    return StorageError(field, str(path), os.strerror(error.errno), fix=STORAGE_FIXES[error.errno])


def report_and_exit_code(directory: Path, failures: Mapping[int, Any], kills: int) -> int:
    """Print which rank failed first, at which step and why; returns the exit code. `failures` is what the agent knows
    of this node's ranks, `kills` how many the kernel killed for want of memory."""
    return print_final_failure(directory, find_first_failure(directory, failures, kills))


def report_with_traceback(directory: Path, failures: Mapping[int, Any], kills: int) -> int:
    """The same of ranks whose directory will be gone: with the traceback, where it is not the user's to mend."""
    first_failure = find_first_failure(directory, failures, kills)
    is_program_error = first_failure["code"] != 2
    prefix = f"rank {first_failure['rank']}: " if is_program_error else ""
    print(f"phalanx: {prefix}{first_failure['reason']}", file=sys.stderr)
    print(first_failure.get("traceback", "") if is_program_error else "", end="", file=sys.stderr)
    return int(first_failure["code"])


def print_failure(directory: Path, failure: Mapping[str, Any]) -> int:
    """Print why the rank that failed first did; returns the exit code."""
    if failure["code"] == 2:
        print(f"phalanx: {failure['reason']}", file=sys.stderr)
        return 2
    print(f"phalanx: {describe_failure(failure)}", file=sys.stderr)
    if "traceback" in failure:
        print(f"  traceback: {hang_dumps.failure_file(directory, failure['rank'])}", file=sys.stderr)
    for line in failure_headline(directory):
        print(f"  {line}", file=sys.stderr)
    return int(failure["code"])


def print_final_failure(directory: Path, failure: Mapping[str, Any]) -> int:
    """The same where ranks are not started again, and how to go on."""
    code = print_failure(directory, failure)
    if code != 2:
        print_resume_hint(directory)
    return code


def describe_failure(failure: Mapping[str, Any]) -> str:
    """Which rank failed, when and why; or what all ranks found."""
    if "suspect_ranks" in failure:
        return str(failure["reason"])
    text = f"failed after step {failure['step']}: " if "step" in failure else ""
    if "lost_peer" in failure:
        text += "it lost another rank: "
    return f"rank {failure['rank']} {text}{failure['reason']}"


def find_first_failure(
    directory: Path, failures: Mapping[int, Any], kills: int = 0, records: Sequence[Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """What the rank that failed first left word of (`write_failure`); of one that had no time to, how it ended. Where
    it only lost another rank that left no word, it says so: "lost_peer". `kills` are the kernel's for want of memory
    since the ranks started, `records` the failure records that count, if not all that are there do."""
    records = read_failures(directory) if records is None else records
    root_causes = [failure for failure in records if not is_peer_loss(failure["reason"])]
    # A rank that was killed left no word, and what the others wrote is that they lost it. NCCL aborts who lost others.
    killed = [(rank, failure.exitcode) for rank, failure in failures.items() if failure.exitcode in FATAL_EXIT_CODES]
    killed.sort(key=lambda candidate: (candidate[1] == -signal.SIGABRT, float(failures[candidate[0]].timestamp)))
    if records and (not killed or (root_causes and all(code == -signal.SIGABRT for _, code in killed))):
        first_record = min(root_causes or records, key=lambda failure: float(failure["time"]))
        return dict(first_record) if root_causes else {**first_record, "lost_peer": True}
    first_exit = min(failures.items(), key=lambda item: float(item[1].timestamp))
    rank, code = killed[0] if killed else (first_exit[0], first_exit[1].exitcode)
    cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    reason = describe_kill(directory, rank, cause, oom_kills=kills)
    record = {"rank": rank, "time": time.time(), "reason": reason, "code": 2 if code == 2 else 1}
    if kills:
        record["out_of_memory"] = True
    try:
        hang_dumps.write_failure(directory, record)
    except OSError as error:  # why it could leave no word; ranks that start again would not get further
        record["reason"] = f"{cause}, and {directory} cannot be written to: {error.strerror}; free space or check it"
        record |= {"code": 2, "storage": True}
    return record


def print_resume_hint(directory: Path) -> None:
    """Print what is there, and the command."""
    saved = checkpoints(directory / CHECKPOINTS_DIR)
    checkpoint_text = f"the last checkpoint is {saved[0].name}" if saved else "there is no checkpoint yet"
    print(f"  {checkpoint_text}; continue with: phalanx train {directory} --resume", file=sys.stderr)


def read_failures(directory: Path) -> list[dict[str, Any]]:
    """The words that ranks left."""
    return list(hang_dumps.read_failures(directory).values())


def write_failure(
    directory: Path,
    rank: int,
    step: int,
    error: BaseException,
    memory: Mapping[str, Any] | None = None,
    final: bool = False,
) -> None:
    """Leave word of why this rank failed, for whoever started it. `step` is the last one that it finished, `memory`
    what it held where that was not enough (`train.guards.oom_report`); `final` says that it would fail again."""
    is_user_error = isinstance(error, UserError)
    record = {
        "rank": rank,
        "step": step,
        "time": time.time(),
        "reason": format_oom_report(memory or {})
        or (str(error) if is_user_error else f"{type(error).__name__}: {error}"),
        "code": 2 if is_user_error else 1,
        "final": final,
        "traceback": traceback.format_exc(),
        **({"out_of_memory": True, **memory} if memory else {}),
        **({"storage": True} if isinstance(error, StorageError) else {}),
        **({"suspect_ranks": error.suspect_ranks} if isinstance(error, DivergenceError) else {}),
    }
    try:
        hang_dumps.write_failure(directory, record)
    except OSError:  # the disk may be what failed
        print(f"phalanx: rank {rank} failed after step {step}: {record['reason']}", file=sys.stderr)
