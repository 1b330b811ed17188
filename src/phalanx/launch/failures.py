"""Failure records: written by ranks, read by the launcher, which finds and prints the first failure."""

from __future__ import annotations

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


def report_and_exit_code(directory: Path, failures: Mapping[int, Any], kills: int) -> int:
    """Print which rank failed first, at which step and why; returns the exit code. `failures` is what the agent knows
    of this node's ranks, `kills` how many the kernel killed for want of memory."""
    return print_final_failure(directory, find_first_failure(directory, failures, kills))


def report_with_traceback(directory: Path, failures: Mapping[int, Any], kills: int) -> int:
    """The same of ranks whose directory will be gone: with the traceback, where it is not the user's to mend."""
    first = find_first_failure(directory, failures, kills)
    mine = first["code"] != 2
    where = f"rank {first['rank']}: " if mine else ""
    print(f"phalanx: {where}{first['reason']}", file=sys.stderr)
    print(first.get("traceback", "") if mine else "", end="", file=sys.stderr)
    return int(first["code"])


def print_failure(directory: Path, first: Mapping[str, Any]) -> int:
    """Print why the rank that failed first did; returns the exit code."""
    if first["code"] == 2:
        print(f"phalanx: {first['reason']}", file=sys.stderr)
        return 2
    print(f"phalanx: {describe_failure(first)}", file=sys.stderr)
    if "traceback" in first:
        print(f"  traceback: {hang_dumps.failure_file(directory, first['rank'])}", file=sys.stderr)
    for line in failure_headline(directory):
        print(f"  {line}", file=sys.stderr)
    return int(first["code"])


def print_final_failure(directory: Path, first: Mapping[str, Any]) -> int:
    """The same where ranks are not started again, and how to go on."""
    code = print_failure(directory, first)
    if code != 2:
        print_resume_hint(directory)
    return code


def describe_failure(first: Mapping[str, Any]) -> str:
    """Which rank failed, when and why; or what all ranks found."""
    if "suspect_ranks" in first:
        return str(first["reason"])
    when = f"failed after step {first['step']}: " if "step" in first else ""
    if "lost_peer" in first:
        when += "it lost another rank: "
    return f"rank {first['rank']} {when}{first['reason']}"


def find_first_failure(
    directory: Path, failures: Mapping[int, Any], kills: int = 0, told: Sequence[Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """What the rank that failed first left word of (`write_failure`); of one that had no time to, how it ended. Where
    it only lost another rank that left no word, it says so: "lost". `kills` are the kernel's for want of memory
    since the ranks started, `told` the words that count, if not all that are there do."""
    told = read_failures(directory) if told is None else told
    own = [failure for failure in told if not is_peer_loss(failure["reason"])]
    # A rank that was killed left no word, and what the others wrote is that they lost it. NCCL aborts who lost others.
    killed = [(rank, failure.exitcode) for rank, failure in failures.items() if failure.exitcode in FATAL_EXIT_CODES]
    killed.sort(key=lambda one: (one[1] == -signal.SIGABRT, float(failures[one[0]].timestamp)))
    if told and (not killed or (own and all(code == -signal.SIGABRT for _, code in killed))):
        first = min(own or told, key=lambda failure: float(failure["time"]))
        return dict(first) if own else {**first, "lost_peer": True}
    first_ended = min(failures.items(), key=lambda item: float(item[1].timestamp))
    rank, code = killed[0] if killed else (first_ended[0], first_ended[1].exitcode)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    record = {"rank": rank, "time": time.time(), "reason": describe_kill(directory, rank, how, kills), "code": 1}
    try:
        hang_dumps.write_failure(directory, record)
    except OSError as error:  # why it could leave no word
        record["reason"] = f"{how}, and {directory} cannot be written to: {error.strerror}; free space or check it"
    return record


def print_resume_hint(directory: Path) -> None:
    """Print what is there, and the command."""
    saved = checkpoints(directory / CHECKPOINTS_DIR)
    last = f"the last checkpoint is {saved[0].name}" if saved else "there is no checkpoint yet"
    print(f"  {last}; continue with: phalanx train {directory} --resume", file=sys.stderr)


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
    what it held where that was not enough (`held.oom_report`); `final` says that it would fail again."""
    meant_for_people = isinstance(error, UserError)
    record = {
        "rank": rank,
        "step": step,
        "time": time.time(),
        "reason": format_oom_report(memory or {})
        or (str(error) if meant_for_people else f"{type(error).__name__}: {error}"),
        "code": 2 if meant_for_people else 1,
        "final": final,
        "traceback": traceback.format_exc(),
        **(memory or {}),
        **({"suspect_ranks": error.suspect_ranks} if isinstance(error, DivergenceError) else {}),
    }
    try:
        hang_dumps.write_failure(directory, record)
    except OSError:  # the disk may be what failed
        print(f"phalanx: rank {rank} failed after step {step}: {record['reason']}", file=sys.stderr)
