"""Failure records: written by ranks, read by the launcher, which finds and logs the first failure."""

from __future__ import annotations

import errno
import logging
import os
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.debug.collective_log import is_peer_loss
from phalanx.debug.explain_run import failure_headline
from phalanx.debug.oom import describe_kill, format_oom_report
from phalanx.launch.process import LAUNCHER_PID_ENV
from phalanx.runs import hang_dumps
from phalanx.runs.checkpoints import CHECKPOINTS_DIR, checkpoints
from phalanx.runs.create import RUN_FILE
from phalanx.runs.errors import DivergenceError
from phalanx.spec.components import named_components
from phalanx.spec.errors import UserError, error_from_record, record_error
from phalanx.spec.files.load import load_run

logger = logging.getLogger(__name__)

FATAL_EXIT_CODES = {
    -number for number in (signal.SIGKILL, signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV, signal.SIGILL)
}


class StorageError(UserError):
    """An error of this node's disk or files that would recur at the next start."""


STORAGE_FIXES = {
    errno.ENOSPC: "free space on this disk, then continue with --resume",
    errno.EDQUOT: "free space or have the disk quota raised, then continue with --resume",
    errno.EROFS: "mount this file system as writable, then continue with --resume",
    errno.ENOENT: "restore this path, then continue with --resume",
    errno.EACCES: "check the permissions of this path, then continue with --resume",
    errno.EPERM: "check the permissions of this path, then continue with --resume",
}
"""Storage errors that would recur at the next start, with their fixes."""


def as_user_error(error: BaseException, directory: Path) -> BaseException:
    """Convert a storage error to one with a fix; return any other error unchanged.

    `directory` is where the run writes, for disk-full errors that do not name a file.
    """
    if not isinstance(error, OSError) or error.errno not in STORAGE_FIXES:
        return error
    is_about_disk = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
    # Without a file name, the error is about a process or a socket.
    if error.filename is None and not is_about_disk:
        return error
    field, path = ("file", error.filename) if error.filename else ("run directory", directory)
    return StorageError(field, str(path), f"cannot be used: {os.strerror(error.errno)}", fix=STORAGE_FIXES[error.errno])


def report_and_exit_code(directory: Path, failures: Mapping[int, Any], kills: int) -> int:
    """Print which rank failed first, at which step and why; return the exit code.

    `failures` are the agent's, `kills` the number of ranks killed by the kernel's OOM killer.
    """
    return log_final_failure(directory, find_first_failure(directory, failures, kills))


def report_with_traceback(directory: Path, failures: Mapping[int, Any], kills: int) -> int:
    """Report failures of ranks whose directory will be deleted; return the exit code.

    The message contains the traceback unless the user can fix the error. `kills` is the number of ranks killed by the
    kernel's OOM killer.
    """
    first_failure = find_first_failure(directory, failures, kills)
    is_program_error = first_failure["code"] != 2
    lines = [first_failure["reason"]]
    if is_program_error:
        lines = [f"rank {first_failure['rank']}: {lines[0]}", first_failure.get("traceback", "")]
    logger.error("%s", "\n".join(lines).rstrip())
    return int(first_failure["code"])


def log_failure(directory: Path, failure: Mapping[str, Any]) -> int:
    """Log the cause of the first failure, and record it if the user can fix it; return the exit code."""
    if failure["code"] == 2:
        logger.error("%s", failure["reason"])
        user_error = error_from_record(failure["error"]) if "error" in failure else None
        record_error(user_error or UserError(f"rank {failure['rank']}", None, failure["reason"]))
        return 2
    lines = [describe_failure(failure)]
    if "traceback" in failure:
        lines.append(f"traceback: {hang_dumps.failure_file(directory, failure['rank'])}")
    logger.error("%s", "\n  ".join([*lines, *failure_headline(directory)]))
    return int(failure["code"])


def log_final_failure(directory: Path, failure: Mapping[str, Any]) -> int:
    """Log a failure after which ranks are not restarted, and how to resume; return the exit code."""
    code = log_failure(directory, failure)
    if code != 2:
        log_resume_hint(directory)
    return code


def describe_failure(failure: Mapping[str, Any]) -> str:
    """Return which rank failed, when and why, or the common finding of all ranks."""
    if "suspect_ranks" in failure:
        return str(failure["reason"])
    text = f"failed after step {failure['step']}: " if "step" in failure else ""
    if "lost_peer" in failure:
        text += "lost the connection to another rank: "
    return f"rank {failure['rank']} {text}{failure['reason']}"


def find_first_failure(
    directory: Path, failures: Mapping[int, Any], kills: int = 0, records: Sequence[Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """Return the failure record of the rank that failed first (`write_failure`).

    For a rank that had no time to write a record, the result describes its exit. If the rank only lost a peer without a
    record, the result contains "lost_peer". `records` are the failure records to consider, by default all in the
    directory.
    """
    records = read_failures(directory) if records is None else records
    root_causes = [failure for failure in records if not is_peer_loss(failure["reason"])]
    # A killed rank wrote no record; the records of others say that they lost it. NCCL aborts ranks that lost a peer.
    killed = [(rank, failure.exitcode) for rank, failure in failures.items() if failure.exitcode in FATAL_EXIT_CODES]
    killed.sort(key=lambda candidate: (candidate[1] == -signal.SIGABRT, float(failures[candidate[0]].timestamp)))
    if records and (not killed or (root_causes and all(code == -signal.SIGABRT for _, code in killed))):
        first_record = min(root_causes or records, key=lambda failure: float(failure["time"]))
        return dict(first_record) if root_causes else {**first_record, "lost_peer": True}
    first_exit = min(failures.items(), key=lambda item: float(item[1].timestamp))
    rank, code = killed[0] if killed else (first_exit[0], first_exit[1].exitcode)
    cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    reason = describe_kill(directory, rank, cause, oom_kills=kills)
    record = {"rank": rank, "time": time.time(), "reason": reason, "code": 2 if code == 2 else 1}
    if kills:
        record["out_of_memory"] = True
    try:
        hang_dumps.write_failure(directory, record)
    except OSError as error:  # the reason for the missing record; restarted ranks would fail at the same point
        reason = f"{cause}; {directory} is not writable: {error.strerror}. Free space or check its permissions"
        record |= {"reason": reason, "code": 2, "storage": True}
    return record


def log_resume_hint(directory: Path) -> None:
    """Log the latest checkpoint and the command that resumes from it."""
    saved = checkpoints(directory / CHECKPOINTS_DIR)
    if saved:
        advice = f"the last checkpoint is {saved[0].name}; continue with"
    else:
        advice = "there is no checkpoint yet; start over with"
    trust = ""
    # Suggest to trust the components, because this user has just run their code.
    with suppress(UserError):
        trust = " --trust" if any(named_components(load_run(directory / RUN_FILE, environment={}))) else ""
    logger.info("  %s: phalanx train %s --resume%s", advice, directory, trust)


def read_failures(directory: Path) -> list[dict[str, Any]]:
    """Return the failure records of all ranks."""
    return list(hang_dumps.read_failures(directory).values())


def write_failure(
    directory: Path,
    rank: int,
    step: int,
    error: BaseException,
    memory: Mapping[str, Any] | None = None,
    final: bool = False,
) -> None:
    """Write a failure record of this rank for its launcher.

    `step` is the last finished one, `memory` the allocated memory if it was insufficient (`train.guards.oom_report`). A
    `final` failure would recur.
    """
    is_user_error = isinstance(error, UserError)
    reason = str(error) if is_user_error else f"{type(error).__name__}: {error}"
    record = {
        "rank": rank,
        "step": step,
        "time": time.time(),
        "reason": format_oom_report(memory or {}) or reason,
        "code": 2 if is_user_error else 1,
        "final": final,
        "traceback": traceback.format_exc(),
        **({"out_of_memory": True, **memory} if memory else {}),
        **({"error": error.to_record()} if isinstance(error, UserError) else {}),
        **({"storage": True} if isinstance(error, StorageError) else {}),
        **({"suspect_ranks": error.suspect_ranks} if isinstance(error, DivergenceError) else {}),
    }
    try:
        hang_dumps.write_failure(directory, record)
    except OSError:  # the disk may be the cause of the failure
        # Without a launcher, this rank reports its failure itself.
        if LAUNCHER_PID_ENV in os.environ:
            logger.error("failed after step %d: %s", step, record["reason"])
