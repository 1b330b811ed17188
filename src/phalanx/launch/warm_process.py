"""A warm process: it has imported PyTorch and Phalanx, and forks processes on request, which start without imports.

It forks before it has a device, a process group or a thread. What it forks are children of the process that asked:
each is forked twice, and the kernel gives the orphan to its nearest ancestor that asked for orphans
(PR_SET_CHILD_SUBREAPER, prctl(2)). Linux only.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from phalanx.launch.fork_server import MESSAGE_BYTES, SIGNALS, can_fork_itself, fork_server

PR_SET_CHILD_SUBREAPER = 36
SERVER = "phalanx.launch.fork_server"
TITLE_BYTES = 4000
"""Room for the command line of a forked process, as `ps` shows it."""
IMPORT_SECONDS = 120.0
FORK_SECONDS = 10.0
"""A warm process that has not imported, or not forked, in this time is given up."""
RANK_MODULES = ("phalanx.train.worker", "phalanx.train.standby")
"""What `python -m phalanx.train` imports."""
RANK_NAME = re.compile(r"rank (\d+)\n")
RANK_VARIABLE = re.compile(r"(?:^|\0)RANK=(\d+)\0")
"""By which a rank's process is known: its name, if it was forked from a warm process, or its first environment."""

# Without the first, restarted gloo ranks find stale addresses. The next two keep freed memory in the process: a step
# allocates and frees the same large tensors again and again, and page faults cost up to a tenth of its time. (Not in
# huge pages: PyTorch's aligned blocks leave gaps between them that cost a sixth to two fifths of the peak.)
WORKER_ENVIRONMENT = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # a store whose server is gone warns with its whole stack
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    # As libgomp itself has it where there are more threads than cores. By default a thread that waits for others spins
    # 300 times as long: beside one busy neighbour steps of a small model on two cores took 3.8 s instead of 0.42, and
    # alone 0.21 s instead of 0.23.
    "GOMP_SPINCOUNT": "1000",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT",  # it would take SIGHUP from nohup
}


SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # no pool of numpy's
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # whether there is a GPU is asked without touching it
}


class WarmProcessError(Exception):
    """The warm process cannot fork."""


class WarmProcess:
    """The side of the process that asks."""

    def __init__(self, modules: Sequence[str]) -> None:
        """Start a process that imports modules; a process that was itself forked from a warm one forks itself."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._socket, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._is_ready = self._is_closed = False
        with server:
            if can_fork_itself(modules):
                self.pid = fork_server(server)
            else:
                command = [sys.executable, "-m", SERVER, str(server.fileno()), ",".join(modules), " " * TITLE_BYTES]
                environment = {**WORKER_ENVIRONMENT, **os.environ, **SERVER_ENVIRONMENT}
                self.pid = subprocess.Popen(
                    command, pass_fds=[server.fileno()], env=environment, stdin=subprocess.DEVNULL
                ).pid

    def fork(self, request: dict[str, Any], fds: Sequence[int]) -> int:
        """Have a process forked for a request of `ForkedProcess`; returns its process id.

        Raises WarmProcessError if the warm process is gone, does not answer in time, or has no memory for it.
        """
        try:
            if not self._is_ready:
                self._receive(IMPORT_SECONDS, "has not imported PyTorch")
                self._is_ready = True
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
            answer = self._receive(FORK_SECONDS, "does not answer")
        except ConnectionError:
            raise WarmProcessError("has ended") from None
        if not answer.isdecimal():
            raise WarmProcessError(answer)
        return int(answer)

    def close(self) -> None:
        """End the warm process; those that it forked stay."""
        if not self._is_closed:
            self._socket.close()
            with suppress(ChildProcessError, ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        self._is_closed = True

    def _receive(self, seconds: float, complaint: str) -> str:
        if not select.select([self._socket], [], [], seconds)[0]:
            raise WarmProcessError(f"{complaint} in {seconds:g} s")
        answer = self._socket.recv(MESSAGE_BYTES).decode()
        if not answer:
            raise WarmProcessError("has ended")
        return answer


class ForkedProcess(subprocess.Popen[Any]):
    """`python -m MODULE ARGUMENTS` as `subprocess.Popen` starts it, forked from a warm process."""

    def __init__(self, warm_process: WarmProcess, args: Sequence[str], name: str = "", **options: Any) -> None:
        """Start a process; `name` is what `top` shows of it.

        Raises WarmProcessError if the warm process cannot fork.
        """
        self._warm_process = warm_process
        self._name = name
        super().__init__(args, **options)

    def _execute_child(  # type: ignore[no-untyped-def]
        self,
        args,
        executable,
        preexec_fn,
        close_fds,
        pass_fds,
        cwd,
        env,
        startupinfo,
        creationflags,
        shell,
        p2cread,
        p2cwrite,
        c2pread,
        c2pwrite,
        errread,
        errwrite,
        restore_signals,
        gid,
        gids,
        uid,
        umask,
        start_new_session,
        process_group,
    ) -> None:
        assert args[1] == "-m", args
        request = {
            "argv": list(args),
            "env": dict(os.environ if env is None else env),
            "cwd": os.fspath(cwd or os.getcwd()),
            "new_session": bool(start_new_session),
            "name": self._name,
            "ignored_signals": [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN],
            "targets": [0, 1, 2, *pass_fds],
        }
        standard = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        try:
            self.pid = self._warm_process.fork(request, [*standard, *pass_fds])
            self._child_created = True
        finally:
            pipe_fds = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
            self._close_pipe_fds(*pipe_fds)  # type: ignore[attr-defined]


def start_warm_process(modules: Sequence[str] = RANK_MODULES) -> WarmProcess | None:
    """Have a process import what ranks need, while this one goes on; None where the system cannot adopt processes."""
    return WarmProcess(modules) if sys.platform == "linux" else None


@contextmanager
def warm_process(modules: Sequence[str] = RANK_MODULES) -> Iterator[WarmProcess | None]:
    """Have one for a while."""
    started = start_warm_process(modules)
    try:
        yield started
    finally:
        if started is not None:
            started.close()


def process_state(folder: Path) -> tuple[str, int]:
    """Return the state of a process (a letter) and its parent, from its folder in /proc.

    Raises OSError of one that has ended.
    """
    # pid (name) state parent ...; the name may hold anything, brackets too
    state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
    return state, int(parent)


def rank_of_process(folder: Path) -> int | None:
    """Return the rank that a process is, from its folder in /proc; None of one that is none.

    Raises OSError of one that has ended, or is another user's.
    """
    match = RANK_NAME.fullmatch((folder / "comm").read_text())
    match = match or RANK_VARIABLE.search((folder / "environ").read_bytes().decode(errors="replace"))
    return int(match[1]) if match else None
