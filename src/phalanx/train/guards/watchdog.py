"""Watchdog that detects a hang of this rank, and writes a dump before its collectives time out.

A background thread polls whether a step has finished, or a collective has started or ended. It never uses the device,
and terminates no rank without a stop request. A rank that was only slow continues, and its dump is removed."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

from phalanx.debug.collective_log import AUTOGRAD_FILE
from phalanx.debug.oom import cgroup_oom_kills
from phalanx.parallel.comm.objects import rank_and_world_size
from phalanx.runs.errors import DivergenceError
from phalanx.runs.hang_dumps import ABORTED, FAILED, FORMAT, STALLED, HangDump, dump_file, fault_file, write_dump
from phalanx.spec.errors import UserError
from phalanx.spec.files.replace import open_no_link
from phalanx.train.guards.flight_recorder import group_ranks, recent_collectives, recorder_fingerprint
from phalanx.train.guards.sibling_processes import resume_stopped, sibling_process_states
from phalanx.train.trainer import Trainer

STALL_FRACTION = 0.85
"""Share of the collective timeout without progress before a dump; the rest is for writing it."""
MIN_POLLS = 40
MAX_POLL_SECONDS = 0.25
"""Minimum number of polls within this share of the timeout, and maximum seconds between polls."""
JOIN_SECONDS = 5.0
"""Maximum wait for a dump in progress, before it is removed."""
MAX_STACK_FRAMES = 40
"""Maximum number of frames of a stack."""
COLLECTIVE_FILES = "torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py"
"""Files in which PyTorch waits for other ranks.

(In the rest of torch/distributed it also reads and writes checkpoints.)"""


class Watchdog:
    """Watchdog of this rank from `__enter__` to `__exit__`."""

    def __init__(self, directory: Path, timeout_seconds: float) -> None:
        """Create the watchdog; `timeout_seconds` is the timeout of collectives."""
        self.directory = directory
        self.rank, self.ranks = rank_and_world_size()
        self.deadline_seconds = STALL_FRACTION * timeout_seconds
        self.trainer: Trainer | None = None
        """Source of the number of finished steps, once it exists."""
        self._oom_kills_at_start = cgroup_oom_kills() or 0
        self._training_thread_id = threading.get_ident()
        self._poll_seconds = min(MAX_POLL_SECONDS, timeout_seconds / MIN_POLLS)
        self._finished = threading.Event()
        self._write_lock = threading.Lock()
        self._stalled_since = time.monotonic()
        self._last_progress = (0, 0.0, 0, b"")
        self._last_dump: HangDump | None = None
        self._stop_preceded_stall = False
        """True if the stop request came before the stall: the rank may be saving, for an unlimited time."""
        self._thread = threading.Thread(target=self._watch_progress, name="watchdog", daemon=True)
        self._fault_log: IO[str] | None = None

    def __enter__(self) -> Self:
        file = fault_file(self.directory, self.rank)
        with suppress(OSError):
            file.parent.mkdir(exist_ok=True)
            file.unlink(missing_ok=True)
            self._fault_log = open(file, "x", opener=open_no_link)
            _install_abort_handler(self._fault_log)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._finished.set()
        if error is not None and not isinstance(error, SystemExit | UserError | DivergenceError):
            self.record_failure(error)
        self._thread.join(JOIN_SECONDS)
        if error is None:
            self._discard_dump()
        if self._fault_log is not None:
            faulthandler.disable()
            self._fault_log.close()
            with suppress(OSError):
                file = fault_file(self.directory, self.rank)
                file.unlink()
                file.parent.rmdir()  # fails, as intended, while other ranks have files there

    @property
    def step(self) -> int:
        """The last step that this rank has finished."""
        return self.trainer.step if self.trainer is not None else 0

    def record_failure(self, error: BaseException) -> None:
        """Dump the stack of this rank's failure, and continue stopped ranks on this host so that they exit."""
        with self._write_lock:
            stack = traceback.extract_tb(error.__traceback__)
            message = f"{type(error).__name__}: {error}"
            # An earlier dump is from before the collective failed, and so more precise.
            if self._last_dump is not None:
                self._last_dump["error"] = message
                self._write_dump(self._last_dump)
            else:
                self._dump_state(FAILED, stack, message)
            resume_stopped(sibling_process_states())

    # -- the thread --------------------------------------------------------------------------------------------------

    def _watch_progress(self) -> None:
        while not self._finished.wait(self._poll_seconds):
            if self._fault_log is not None and os.fstat(self._fault_log.fileno()).st_size > 0:
                self._record_abort()
                return
            now = time.monotonic()
            progress = self._read_progress()
            if progress != self._last_progress:
                self._last_progress = progress
                self._stalled_since = now
                with self._write_lock:
                    # The dump of a failure is kept.
                    if not self._finished.is_set():
                        self._discard_dump()
            elif now - self._stalled_since > self.deadline_seconds:
                stop_requested = self.trainer is not None and self.trainer.stop_requested
                if self._last_dump is None:
                    self._stop_preceded_stall = stop_requested
                    with self._write_lock:
                        if not self._finished.is_set():
                            self._dump_state(STALLED, _read_thread_stack(self._training_thread_id))
                elif stop_requested and not self._stop_preceded_stall:
                    # It hung before the stop request, and would hang until it is killed.
                    os._exit(1)

    def _read_progress(self) -> tuple[int, float, int, bytes]:
        """Return values that change while this rank makes progress."""
        if self.trainer is None:
            return 0, 0.0, 0, recorder_fingerprint()
        # Waits for another stage and for uploads are in no recorder.
        waited_seconds = self.trainer.strategy.comm_wait.seconds
        return self.step, waited_seconds, self.trainer.checkpointer.num_upload_polls, recorder_fingerprint()

    def _record_abort(self) -> None:
        """Write a dump for a PyTorch thread that aborts and waits (`_install_abort_handler`), then abort."""
        with self._write_lock:
            error = "aborted (SIGABRT) by a library: see its last output"
            self._dump_state(ABORTED, _read_thread_stack(self._training_thread_id), error)
        ctypes.CDLL(None).signal(int(signal.SIGABRT), None)
        os.kill(os.getpid(), signal.SIGABRT)

    def _dump_state(self, reason: str, stack: traceback.StackSummary, error: str | None = None) -> None:
        """Write a dump without collectives, then with them, then with their calling lines."""
        dump: HangDump = {
            "format": FORMAT,
            "rank": self.rank,
            "ranks": self.ranks,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
            "step": self.step,
            "why": reason,
            "stalled_seconds": round(time.monotonic() - self._stalled_since, 1),
            "stack": [(frame.filename, frame.lineno or 0, frame.name) for frame in reversed(stack)][:MAX_STACK_FRAMES],
            "waiting": _is_waiting(stack),
            "groups": group_ranks(),
            "calls": [],
            "oom_kills": (cgroup_oom_kills() or 0) - self._oom_kills_at_start,
            "sibling_states": {str(rank): state for rank, (_, state) in sibling_process_states().items()},
        }
        if error is not None:
            dump["error"] = error
        self._last_dump = dump
        # Write now, because reading the recorder may block if the driver hangs.
        self._write_dump(dump)
        for with_lines in (False, True):
            dump["calls"] = recent_collectives(with_lines)
            self._write_dump(dump)

    def _write_dump(self, dump: HangDump) -> None:
        with suppress(OSError):  # the disk may be the cause of the failure
            write_dump(self.directory, dump)

    def _discard_dump(self) -> None:
        """Discard the hang dump after the rank has resumed."""
        if self._last_dump is not None:
            self._last_dump = None
            dump_file(self.directory, self.rank).unlink(missing_ok=True)


def _read_thread_stack(thread: int) -> traceback.StackSummary:
    """Return the stack of a thread, outermost frame first."""
    frames = sys._current_frames()
    stack = traceback.extract_stack(frames.get(thread))
    # On a GPU backward passes run in a thread of PyTorch, which has no name in Python.
    unnamed = set(frames) - {python_thread.ident for python_thread in threading.enumerate()}
    if unnamed and stack and AUTOGRAD_FILE in stack[-1].filename:
        stack += traceback.extract_stack(frames[min(unnamed)])
    return stack


def _is_waiting(stack: traceback.StackSummary) -> bool:
    """Return whether the stack waits for other ranks: in PyTorch's collectives, or for a pending one."""
    in_collective = any(frame.filename.endswith(COLLECTIVE_FILES) for frame in stack[-4:])
    return in_collective or (bool(stack) and ".wait(" in (stack[-1].line or ""))


def _install_abort_handler(file: IO[str]) -> None:
    """Make a rank write its stack if an error signal kills it.

    Gloo aborts the process if sizes differ. Its thread then sleeps for the number of SIGABRT in seconds, which leaves
    time for a dump. (faulthandler calls the previous handler, here libc's sleep.)"""
    faulthandler.disable()  # with PYTHONFAULTHANDLER=1 it would keep the handler that it has saved
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        libc.signal.restype = ctypes.c_void_p
        libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
    faulthandler.enable(file, all_threads=True)
