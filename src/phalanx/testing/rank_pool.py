"""Parent process of the pool: start the ranks once, send each a function, gather the results."""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from phalanx.debug.collective_order import CollectiveOrder
from phalanx.runs.hang_dumps import HANGS_DIR, calls_file
from phalanx.spec.errors import UserError
from phalanx.testing.processes import start_python
from phalanx.testing.rank_failure import CallResult, RankError, RankFailure

START_SECONDS = 180.0
ORDER_CHECK_SECONDS = 2.0
"""Interval at which the collectives of ranks that have not returned are compared."""
GRACE_SECONDS = 1.0
"""Time for the other ranks to report after the first failure; most then hang in a collective."""
OUTPUT_BYTES = 4_000
"""Maximum bytes of a rank's output in a failure."""
MAX_GROWTH_BYTES = 3 * 2**28
"""Maximum growth of the ranks' total memory before they are replaced.

The kernels that oneDNN compiles for every shape stay in a process."""

_pools: dict[tuple[int, str], RankPool] = {}


def rank_pool(world_size: int, device: str = "cpu") -> RankPool:
    """Return this process's pool of this size; its ranks start at the first run and exit with the process."""
    return _pools.setdefault((world_size, device), RankPool(world_size, device))


@atexit.register
def close_all() -> None:
    """Stop the ranks of every pool."""
    for pool in _pools.values():
        pool.close()


class RankPool:
    """Fresh single-threaded processes in one process group, which run one function at a time.

    The backend is gloo, on `device` "cuda" also NCCL. If there are more ranks than GPUs, ranks share GPUs."""

    def __init__(self, world_size: int, device: str = "cpu") -> None:
        if world_size < 1:
            raise UserError("world_size", world_size, "is not a valid number of ranks", "use at least 1")
        self.world_size = world_size
        self.device = device
        self._initial_resident_bytes = 0
        self._workers: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._logs = Path()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank at once, and return the results in rank order.

        Every call has a new world, a fixed random seed, and no groups or DTensor caches of earlier calls. The pool
        restarts at its next use unless every rank has answered. The function is a top-level one of an importable
        module. Raises RankError if a rank raises, dies or has not returned in time, or collectives differ. Raises
        UserError if a rank cannot import `function`.
        """
        name = f"{function.__module__}.{function.__qualname__}"
        if function.__module__ == "__main__" or "<" in function.__qualname__:
            raise UserError("function", name, "cannot be imported by a rank", "define it at the top level of a module")
        call = pickle.dumps((sys.path, pickle.dumps((function, args, kwargs)), timeout + START_SECONDS))
        try:
            if not self._workers:
                self._start_workers()
            results = self._run_call(name, call, timeout)
            self._initial_resident_bytes = self._initial_resident_bytes or self._resident_bytes()
            if self._resident_bytes() > self._initial_resident_bytes + MAX_GROWTH_BYTES:
                self.close()
            return results
        except BaseException as error:
            # A rank that has not answered may be anywhere in the function, so no later call can use it.
            if not (isinstance(error, RankError) and error.all_returned):
                self.close()
            raise

    def close(self) -> None:
        """Kill the ranks and all their child processes."""
        for worker in self._workers:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
        for worker, pipe in zip(self._workers, self._pipes, strict=True):
            worker.wait()
            pipe.close()
        if self._workers:
            shutil.rmtree(self._logs, ignore_errors=True)
        self._workers = []
        self._pipes = []
        self._initial_resident_bytes = 0

    def _resident_bytes(self) -> int:
        """Return the resident bytes of all ranks; 0 without /proc."""
        statements = [Path(f"/proc/{worker.pid}/statm") for worker in self._workers]
        pages = (int(file.read_text().split()[1]) for file in statements if file.exists())
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")

    def _start_workers(self) -> None:
        self._logs = Path(tempfile.mkdtemp(prefix="phalanx-ranks-"))
        (self._logs / HANGS_DIR).mkdir()
        # Rank 0 inherits the listening socket itself: no other process can take its port between choice and use.
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            for rank in range(self.world_size):
                parent_end, child_end = Pipe()
                fds = [child_end.fileno(), *([listener.fileno()] if rank == 0 else [])]
                command = [sys.executable, "-m", "phalanx.testing.rank_worker", *map(str, fds)]
                environment = self._build_environment(rank, listener.getsockname()[1])
                options: dict[str, Any] = {"env": environment, "pass_fds": fds, "start_new_session": True}
                with open(self._logs / f"{rank}.output", "wb") as output:
                    streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
                    worker = start_python(command, **options, **streams)
                child_end.close()
                self._workers.append(worker)
                self._pipes.append(parent_end)
        self._gather_results("the start of the ranks", START_SECONDS, [0] * self.world_size, CollectiveOrder({}))

    def _build_environment(self, rank: int, port: int) -> dict[str, str]:
        variables = {
            "RANK": rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": self.world_size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "OMP_NUM_THREADS": 1,
            "PYTHONUNBUFFERED": 1,
            "PHALANX_RANK_LOGS": self._logs,
            "PHALANX_RANK_DEVICE": self.device,
            **(shared_gpu_environment(rank) if self.device == "cuda" else {}),
        }
        return {**os.environ, **{name: str(value) for name, value in variables.items()}}

    def _run_call(self, name: str, call: bytes, timeout: float) -> list[Any]:
        offsets = [(self._logs / f"{rank}.output").stat().st_size for rank in range(self.world_size)]
        call_logs = {rank: calls_file(self._logs, rank) for rank in range(self.world_size)}
        for file in call_logs.values():
            file.unlink(missing_ok=True)
        for pipe in self._pipes:
            pipe.send_bytes(call)
        return [
            pickle.loads(value) for value in self._gather_results(name, timeout, offsets, CollectiveOrder(call_logs))
        ]

    def _gather_results(self, name: str, timeout: float, offsets: list[int], order: CollectiveOrder) -> list[bytes]:
        """Return every rank's pickled result; raise RankError for a failure or different collectives."""
        start = time.monotonic()
        deadline = start + timeout
        results: dict[int, bytes] = {}
        outcomes: dict[int, RankFailure] = {}
        difference = None
        while len(outcomes) < self.world_size and time.monotonic() < deadline:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in outcomes}
            remaining_seconds = max(0.0, deadline - time.monotonic())
            ready = wait(list(waiting), min(remaining_seconds, ORDER_CHECK_SECONDS))
            if not ready:
                difference = order.first_difference(results)
            if difference is not None:
                break  # ranks that differ wait for each other
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                outcomes[rank] = self._receive_result(rank, start, results)
                if rank not in results:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        difference = difference or order.first_difference(results)
        if len(results) == self.world_size and difference is None:
            return [results[rank] for rank in range(self.world_size)]
        missing = [rank for rank in range(self.world_size) if rank not in outcomes]
        failures = [*outcomes.values(), *self._collect_stacks(missing, time.monotonic() - start)]
        failures = [self._attach_output(failure, offsets[failure.rank], order) for failure in failures]
        raise RankError(name, failures, difference.message if difference is not None else "")

    def _receive_result(self, rank: int, start: float, results: dict[int, bytes]) -> RankFailure:
        try:
            result: CallResult = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            code = self._workers[rank].wait()
            summary = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return RankFailure(rank=rank, kind="died", seconds=time.monotonic() - start, summary=summary)
        if result.kind == "returned":
            results[rank] = result.value
        texts = {"summary": result.summary, "detail": result.traceback}
        return RankFailure(rank=rank, kind=result.kind, seconds=result.finished_at - start, **texts)

    def _collect_stacks(self, missing: list[int], seconds: float) -> list[RankFailure]:
        """Return failures with the stacks of the missing ranks, which faulthandler writes on a signal."""
        stacks = {rank: self._logs / f"{rank}.stack" for rank in missing}
        for rank in missing:
            if stacks[rank].exists():
                self._workers[rank].send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and not all(s.exists() and s.stat().st_size for s in stacks.values()):
            time.sleep(0.02)
        failures = []
        for rank, stack in stacks.items():
            text = stack.read_text() if stack.exists() else ""
            failures.append(RankFailure(rank=rank, kind="did not return", seconds=seconds, detail=text))
        return failures

    def _attach_output(self, failure: RankFailure, offset: int, order: CollectiveOrder) -> RankFailure:
        """Add a rank's output, and its last collectives if it did not leave the function."""
        last_calls = order.describe_last_calls(failure.rank) if failure.kind in ("died", "did not return") else ""
        parts = [failure.summary, f"it called last: {last_calls}" if last_calls else ""]
        with open(self._logs / f"{failure.rank}.output", "rb") as file:
            file.seek(max(offset, os.fstat(file.fileno()).st_size - OUTPUT_BYTES))
            output = file.read().decode(errors="replace").strip()
        return replace(failure, summary="; ".join(filter(None, parts)), output=output)


def shared_gpu_environment(rank: int) -> dict[str, str]:
    """Return the environment variables of a rank that shares a GPU with other ranks of its node.

    NCCL rejects two ranks of one host on one GPU, so each rank has a host id of its own. The ranks communicate by
    sockets (NCCL 2.28)."""
    return {"NCCL_HOSTID": f"rank{rank}", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_MAX_NCHANNELS": "2"}
