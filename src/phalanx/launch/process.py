"""What ranks find when they start, how they join and leave, and the word that they leave of a failure."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.debug.collective_log import is_peer_loss
from phalanx.debug.explain_run import failure_headline
from phalanx.debug.oom import describe_kill, format_oom_report
from phalanx.runs import hang_dumps
from phalanx.runs.checkpoints import checkpoints
from phalanx.runs.create import EXIT_INTERRUPTED, EXIT_STOPPED
from phalanx.spec.errors import LocalNodeError, UserError
from phalanx.spec.run import RunSpec
from phalanx.train.guards.divergence import DivergenceError
from phalanx.train.guards.flight_recorder import enable_flight_recorder

# Without the first, restarted gloo ranks find stale addresses. The next two keep freed memory in the process: a step
# allocates and frees the same large tensors again and again, and page faults cost up to a tenth of its time. (Not in
# huge pages: PyTorch's aligned blocks leave gaps between them that cost a sixth to two fifths of the peak.)
WORKER_ENVIRONMENT = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # a store whose server is gone warns with its whole stack
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT",  # it would take SIGHUP from nohup
}

FATAL_EXIT_CODES = {
    -number for number in (signal.SIGKILL, signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV, signal.SIGILL)
}
FORCE_EXIT_SECONDS = 5.0


LAUNCHER_PID_ENV = "PHALANX_LAUNCHER"
"""Names to ranks the process that waits for them, reads what they leave in failures/, and prints the first."""

PR_SET_PDEATHSIG = 1


def select_device(run: RunSpec) -> str:
    """ "cuda" or "cpu".

    Raises UserError if the run asks for a GPU that is not there, or in a precision that it lacks.
    """
    wanted = run.cluster.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise LocalNodeError(
            "cluster.device", "cuda", "PyTorch sees no GPU here", 'set cluster.device = "cpu" or "auto"'
        )
    return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"


def select_nproc(run: RunSpec, asked: int | None = None) -> int:
    """Ranks to start on this node: as asked, as the run file says, or one per GPU (one on a CPU).

    Raises UserError if there are fewer GPUs than ranks.
    """
    gpus = torch.cuda.device_count() if select_device(run) == "cuda" else 0
    nproc = asked or run.cluster.nproc_per_node or max(1, gpus)
    if gpus and nproc > gpus:
        raise LocalNodeError(
            "--nproc", nproc, f"this machine has {gpus} GPUs", f'use at most {gpus}, or cluster.device = "cpu"'
        )
    return nproc


def set_worker_environment(nproc: int) -> None:
    """What processes must find set when they start; what the user has set stays."""
    threads = str(max(1, (os.cpu_count() or 1) // nproc))
    for name, value in {**WORKER_ENVIRONMENT, "OMP_NUM_THREADS": threads}.items():
        os.environ.setdefault(name, value)


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
    if "blamed" in first:
        return str(first["reason"])
    when = f"failed after step {first['step']}: " if "step" in first else ""
    if "lost" in first:
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
        return dict(first) if own else {**first, "lost": True}
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
    saved = checkpoints(directory / "checkpoints")
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
        **({"blamed": error.suspect_ranks} if isinstance(error, DivergenceError) else {}),
    }
    try:
        hang_dumps.write_failure(directory, record)
    except OSError:  # the disk may be what failed
        print(f"phalanx: rank {rank} failed after step {step}: {record['reason']}", file=sys.stderr)


def env_rank() -> int:
    """As torchrun's environment has it, also before ranks have joined; 0 without one."""
    return int(os.environ.get("RANK", "0"))


def init_distributed(device_type: str, timeout_seconds: float, ranks: int | None = None) -> torch.device:
    """Join the process group that torchrun's environment describes, if any, or that of the first `ranks` of it; returns
    this rank's device."""
    die_with_launcher()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device_type == "cuda":
        torch.cuda.set_device(local_rank)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        enable_flight_recorder()
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        timeout = timedelta(seconds=timeout_seconds)
        rank, ranks = (-1, -1) if ranks is None else (int(os.environ["RANK"]), ranks)  # -1: as the environment says
        dist.init_process_group(backend, timeout=timeout, rank=rank, world_size=ranks)
        # Groups that are made later, those of a mesh among them, take PyTorch's own timeouts: half an hour on gloo.
        c10d: Any = dist.distributed_c10d
        c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout
    return torch.device(device_type, local_rank) if device_type == "cuda" else torch.device("cpu")


def die_with_launcher() -> None:
    """Where `launch_ranks` waits for this rank, end with it, by SIGKILL: torchrun's agent gives each rank a session of
    its own, and one that outlived the agent would train on unseen, in the way of the run's next start."""
    launcher = int(os.environ.get(LAUNCHER_PID_ENV, "0"))
    if launcher and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it ended before the kernel was asked
            os._exit(1)


def exit_rank(code: int) -> None:
    """End this process. Interpreter shutdown beside gloo's threads aborts now and then, so it is skipped."""
    if dist.is_initialized() and code in (0, EXIT_STOPPED):
        dist.barrier()
        dist.destroy_process_group()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def stop_signals() -> list[signal.Signals]:
    """Those that end a run in order; SIGHUP unless nohup has it ignored."""
    hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    return [signal.SIGTERM, signal.SIGINT, *hangup]


@contextmanager
def handling_signals(heard: Callable[[int], None]) -> Iterator[None]:
    """SIGTERM (Slurm, torchrun), Ctrl-C and a terminal that is closed are `heard`, so that the process can end in
    order; one more, some seconds later, ends it at once. (Ctrl-C reaches a rank twice: from the terminal and from
    torchrun.)"""
    first: float | None = None

    def stop(number: int, _: object) -> None:
        nonlocal first
        first = first or time.monotonic()
        if time.monotonic() - first > FORCE_EXIT_SECONDS:
            os._exit(EXIT_INTERRUPTED)
        heard(number)

    before = {number: signal.signal(number, stop) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
