"""Program of a warm process: it imports modules and forks a process per request.

Requests come from `phalanx.launch.warm_process`.

Usage: python -m phalanx.launch.fork_server SOCKET_FD MODULES PADDING

Why: `docs/design/decisions/forked-ranks.md`.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import io
import json
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from phalanx.spec.errors import EXIT_INTERRUPTED
from phalanx.spec.parent_process import end_with_parent

PR_SET_NAME = 15
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
"""Signals that a started process also ignores if they are ignored here, as under nohup."""
MESSAGE_BYTES = 2**20
MAX_FDS = 64
FIRST_FREE_FD = 512
"""File descriptors are moved to numbers from here on, so that the target numbers are free."""
FIRST_STEP_MODULES = ("torch._dynamo", "tensorboard.summary.writer.record_writer", "numpy.ma", "numpy.random")
"""Modules that ranks import during their first step. They are imported here once ranks run, for restarted ranks."""
IDLE_SECONDS = 2.0
"""Seconds after which running ranks have finished their imports."""
_is_forked = False
"""True in a process that was forked from a warm process."""


def can_fork_itself(modules: Sequence[str]) -> bool:
    """Return whether a fork of this process would be warm: it was forked from one and has no threads."""
    has_modules = all(module in sys.modules for module in modules)
    return _is_forked and has_modules and len(os.listdir("/proc/self/task")) == 1


def fork_server(server: socket.socket) -> int:
    """Serve requests in a fork of this process, with its other files closed; return the process id."""
    pid = os.fork()
    if pid == 0:
        os.closerange(3, server.fileno())
        os.closerange(server.fileno() + 1, 2**16)
        _serve_fork_requests(server)
    return pid


def _serve_fork_requests(server: socket.socket) -> NoReturn:
    """Fork for each request until no client is left."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the clients
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    set_process_title([argument for argument in sys.orig_argv if not argument.isspace()], "phalanx warm")
    gc.freeze()
    has_forked = False
    with suppress(ConnectionError):
        server.send(b"ready")
        while True:
            if has_forked and not select.select([server], [], [], IDLE_SECONDS)[0]:
                has_forked = False
                for module in FIRST_STEP_MODULES:
                    import_module(module)
            message, fds, *_ = socket.recv_fds(server, MESSAGE_BYTES, MAX_FDS)
            if not message:
                break
            server.send(_fork_orphan(server, json.loads(message), fds).encode())
            has_forked = True
            for fd in fds:
                os.close(fd)
    os._exit(0)


def _fork_orphan(server: socket.socket, request: dict[str, Any], fds: list[int]) -> str:
    """Fork twice; return the process id of the grandchild, or an error message."""
    reading_end, writing_end = os.pipe()
    try:
        child = os.fork()
    except OSError as error:
        os.close(reading_end)
        os.close(writing_end)
        return f"cannot fork: {error.strerror}"
    if child == 0:
        parent = os.getpid()
        try:
            grandchild = os.fork()
        except OSError:
            os._exit(1)
        if grandchild:
            os._exit(0)
        # Wait until the parent has exited and the kernel has reparented this process to the client.
        while os.getppid() == parent:
            time.sleep(0.001)
        server.close()
        os.close(reading_end)
        # Move the descriptors away from the numbers that are needed as targets.
        opened = [*fds, writing_end]
        *fds, writing_end = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE_FD) for fd in opened]
        for fd in opened:
            os.close(fd)
        if "torch" in sys.modules and sys.modules["torch"].cuda._is_in_bad_fork():
            os.write(writing_end, b"has already used a GPU")
            os._exit(1)
        _prepare_process(request, fds)
        os.write(writing_end, str(os.getpid()).encode())
        os.close(writing_end)
        _run_module(request["argv"])
    os.close(writing_end)
    os.waitpid(child, 0)
    answer = os.read(reading_end, 100).decode()
    os.close(reading_end)
    return answer or "cannot fork: the second fork failed"


def _prepare_process(request: dict[str, Any], fds: list[int]) -> None:
    """Set up this process as requested, except for the module to run."""
    global _is_forked
    _is_forked = True
    if request["new_session"]:
        os.setsid()
    for fd, target in zip(fds, request["targets"], strict=True):
        os.dup2(fd, target)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    num_threads = os.environ.get("OMP_NUM_THREADS", "")
    if "torch" in sys.modules and num_threads.isdecimal():  # OpenMP has read the variable already
        sys.modules["torch"].set_num_threads(int(num_threads))
    os.chdir(request["cwd"])
    if "-P" not in request["argv"][:2]:
        sys.path.insert(0, request["cwd"])
    tempfile.tempdir = None
    for number in SIGNALS:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored_signals"] else default)
    _open_standard_streams()
    set_process_title(request["argv"], request["name"] or Path(request["argv"][0]).name)


def _run_module(argv: Sequence[str]) -> NoReturn:
    """Run `python [-P] -m MODULE ARGUMENTS` in this process and exit."""
    module, *arguments = argv[argv.index("-m") + 1 :]
    sys.argv = [module, *arguments]  # runpy replaces the first element with the module's file
    # Drop the exit handlers of the parent, as multiprocessing does after a fork.
    atexit._clear()
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            code = end.code or 0
        else:
            print(end.code, file=sys.stderr)  # noqa: T201 -- as Python does
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):
            stream.flush()
    os._exit(code)


def _open_standard_streams() -> None:
    """Open the standard streams as Python does at start-up (create_stdio in CPython's pylifecycle.c)."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for name, fd, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        raw: Any = open(fd, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        line_buffering = not unbuffered and (name == "stderr" or os.isatty(fd))
        stream = io.TextIOWrapper(raw, "utf-8", errors, line_buffering=line_buffering, write_through=unbuffered)
        setattr(sys, name, stream)


def set_process_title(argv: Sequence[str], name: str) -> None:
    """Set the command line that `ps` shows, as far as it fits, and the name that `top` shows.

    They equal those of a newly started process.
    """
    *_, arg_start, arg_end = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47]
    start = int(arg_start)
    room = int(arg_end) - int(arg_start)
    text = b"\0".join(argument.encode() for argument in argv)[: room - 1]
    if start:
        ctypes.memmove(start, text.ljust(room, b"\0"), room)
    if name:
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def main() -> NoReturn:
    """Import the modules and serve requests."""
    server = socket.socket(fileno=int(sys.argv[1]))
    try:
        for module in sys.argv[2].split(","):
            import_module(module)
    except KeyboardInterrupt:  # Ctrl-C goes to all processes of a terminal; the launcher reports it
        sys.exit(EXIT_INTERRUPTED)
    _serve_fork_requests(server)


if __name__ == "__main__":
    from phalanx.launch import fork_server as this_module  # the same module that forked processes import

    this_module.main()
