"""A warm process: it has imported PyTorch and Phalanx, and forks processes on request.

It forks before it has a device, a process group or a thread. Forked processes become children of the client process:
each is forked twice, and the kernel reparents the orphan to its nearest ancestor that adopts orphans
(PR_SET_CHILD_SUBREAPER, prctl(2)). Linux only.

Why: `docs/design/decisions/allocator-environment.md`.
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
"""Bytes for the command line of a forked process, as `ps` shows it."""
IMPORT_SECONDS = 120.0
FORK_SECONDS = 10.0
"""Timeout in seconds of a warm process for its imports and for a fork."""
RANK_MODULES = ("phalanx.train.worker", "phalanx.train.standby")
"""Modules that `python -m phalanx.train` imports."""
RANK_NAME = re.compile(r"rank (\d+)\n")
RANK_VARIABLE = re.compile(r"(?:^|\0)RANK=(\d+)\0")
"""Pattern that identifies a rank's process: its name, if forked from a warm process, or its initial environment."""

# Without the first, restarted gloo ranks find stale addresses. The next two keep freed memory in the process: a step
# allocates and frees the same large tensors repeatedly, and page faults cost up to a tenth of its time. (Not in
# huge pages: PyTorch's aligned blocks leave gaps between them that cost a sixth to two fifths of the peak.)
WORKER_ENVIRONMENT = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # a store without its server prints a warning with its full stack
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    # Default of libgomp with more threads than cores. Otherwise a waiting thread spins 300 times as long: next to one
    # busy neighbor, steps of a small model on two cores took 3.8 s instead of 0.42, and without a neighbor 0.21 s
    # instead of 0.23.
    "GOMP_SPINCOUNT": "1000",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT",  # SIGHUP excluded: torchelastic would override nohup
}
SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # no thread pool in numpy
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # looks for a GPU without initializing it
}


class WarmProcessError(Exception):
    """The warm process cannot fork."""


class WarmProcess:
    """Client of a warm process."""

    def __init__(self, modules: Sequence[str]) -> None:
        """Start a process that imports modules; a process that was itself forked from a warm one forks itself."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._socket, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._is_ready = self._is_closed = False
        with server:
            if can_fork_itself(modules):
                self.pid = fork_server(server)
            else:
                arguments = [str(server.fileno()), ",".join(modules), " " * TITLE_BYTES]
                command = [sys.executable, "-P", "-m", SERVER, *arguments]
                environment = {**WORKER_ENVIRONMENT, **os.environ, **SERVER_ENVIRONMENT}
                options: dict[str, Any] = {"env": environment, "stdin": subprocess.DEVNULL}
                self.pid = subprocess.Popen(command, pass_fds=[server.fileno()], **options).pid

    def fork(self, request: dict[str, Any], fds: Sequence[int]) -> int:
        """Fork a process for a request of `ForkedProcess`; return its process id.

        Raises WarmProcessError if the warm process has exited, does not answer in time, or has insufficient memory.
        """
        try:
            if not self._is_ready:
                self._receive_answer(IMPORT_SECONDS, "did not import PyTorch")
                self._is_ready = True
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
            answer = self._receive_answer(FORK_SECONDS, "did not answer")
        except ConnectionError:
            raise WarmProcessError("has exited") from None
        if not answer.isdecimal():
            raise WarmProcessError(answer)
        return int(answer)

    def close(self) -> None:
        """End the warm process; processes forked from it keep running."""
        if not self._is_closed:
            self._socket.close()
            with suppress(ChildProcessError, ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        self._is_closed = True

    def _receive_answer(self, seconds: float, complaint: str) -> str:
        if not select.select([self._socket], [], [], seconds)[0]:
            raise WarmProcessError(f"{complaint} within {seconds:g} s")
        answer = self._socket.recv(MESSAGE_BYTES).decode()
        if not answer:
            raise WarmProcessError("has exited")
        return answer


class ForkedProcess(subprocess.Popen[Any]):
    """Process `python [-P] -m MODULE ARGUMENTS`, forked from a warm process, with subprocess.Popen's interface."""

    def __init__(self, warm_process: WarmProcess, args: Sequence[str], name: str = "", **options: Any) -> None:
        """Start a process; `name` is the name that `top` shows.

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
        assert args[1] == "-m" or args[1:3] == ["-P", "-m"], args
        request = {
            "argv": list(args),
            "env": dict(os.environ if env is None else env),
            "cwd": os.fspath(cwd or os.getcwd()),
            "new_session": bool(start_new_session),
            "name": self._name,
            "ignored_signals": [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN],
            "targets": [0, 1, 2, *pass_fds],
        }
        standard = [standard_fd if fd == -1 else fd for standard_fd, fd in enumerate((p2cread, c2pwrite, errwrite))]
        try:
            self.pid = self._warm_process.fork(request, [*standard, *pass_fds])
            self._child_created = True
        finally:
            pipe_fds = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
            self._close_pipe_fds(*pipe_fds)  # type: ignore[attr-defined]


def start_warm_process(modules: Sequence[str] = RANK_MODULES) -> WarmProcess | None:
    """Start a warm process with the imports of ranks; return None if the system cannot adopt orphans.

    The call does not wait for the imports.
    """
    return WarmProcess(modules) if sys.platform == "linux" else None


@contextmanager
def warm_process(modules: Sequence[str] = RANK_MODULES) -> Iterator[WarmProcess | None]:
    """Provide a warm process within the context, and close it afterwards."""
    started = start_warm_process(modules)
    try:
        yield started
    finally:
        if started is not None:
            started.close()


def process_state(folder: Path) -> tuple[str, int]:
    """Return the state of a process (a letter) and its parent, from its directory in /proc.

    Raises OSError if the process has exited.
    """
    # pid (name) state parent ...; the name may contain any characters, parentheses too
    state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
    return state, int(parent)


def rank_of_process(folder: Path) -> int | None:
    """Return the rank of a process, from its directory in /proc; None if it is not a rank.

    Raises OSError if the process has exited, or belongs to another user.
    """
    match = RANK_NAME.fullmatch((folder / "comm").read_text())
    match = match or RANK_VARIABLE.search((folder / "environ").read_bytes().decode(errors="replace"))
    return int(match[1]) if match else None
