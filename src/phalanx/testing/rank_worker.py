"""One rank of the pool: a process that runs the pool's functions until the pool exits.

Usage: python -m phalanx.testing.rank_worker PIPE_FD [LISTENING_SOCKET_FD]"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import queue
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.distributed.tensor._random as tensor_random
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from phalanx.debug.collective_order import is_check_enabled
from phalanx.runs.hang_dumps import calls_file
from phalanx.spec.log import log_to_stderr
from phalanx.testing.rank_failure import CallResult
from phalanx.train.guards.collective_log import CollectiveLog

# The pool's own timeout ends a hung call; the group's only has to be longer than any call.
GROUP_TIMEOUT = timedelta(hours=2)


def main(pipe_fd: int, listener_fd: int | None = None) -> None:
    """Serve calls until the pipe closes."""
    log_to_stderr()
    pipe = Connection(pipe_fd)
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_queue_calls, args=(pipe, calls), daemon=True).start()
    logs = Path(os.environ["PHALANX_RANK_LOGS"])
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    stack = open(logs / f"{rank}.stack", "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    torch.set_num_threads(1)
    # The store of all ranks. Rank 0 serves it, on a listening socket if the pool gives one.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=rank == 0,
        timeout=GROUP_TIMEOUT,
        master_listen_fd=listener_fd,
    )
    _send_result(pipe, "returned")
    collective_log = CollectiveLog() if is_check_enabled() else None
    for number in count(1):
        paths, call, limit = pickle.loads(calls.get())
        sys.path[:] = paths
        # The last resort if a call holds the GIL after the pool has exited: a thread in C ends the process.
        faulthandler.dump_traceback_later(limit, exit=True)
        try:
            _reset_world(c10d.PrefixStore(str(number), store), rank, world_size)
            function, args, kwargs = pickle.loads(call)
            if collective_log is not None:
                collective_log.open(calls_file(logs, rank))
            value = pickle.dumps(function(*args, **kwargs))
        except BaseException as error:
            summary = traceback.format_exception_only(error)[-1].strip().partition("\n")[0]
            _send_result(pipe, "raised", summary=summary, traceback="".join(traceback.format_exception(error)))
        else:
            _send_result(pipe, "returned", value=value)
        faulthandler.cancel_dump_traceback_later()


def _send_result(pipe: Connection, kind: Literal["raised", "returned"], **contents: Any) -> None:
    """Send a `CallResult` with these contents."""
    result = CallResult(kind=kind, finished_at=time.monotonic(), **contents)
    sys.stdout.flush()
    pipe.send_bytes(pickle.dumps(result))


def _queue_calls(pipe: Connection, calls: queue.SimpleQueue[bytes]) -> None:
    """Queue incoming calls; if the pool's end of the pipe closes, kill this process group."""
    try:
        while True:
            calls.put(pipe.recv_bytes())
    except (EOFError, OSError):
        shutil.rmtree(os.environ["PHALANX_RANK_LOGS"], ignore_errors=True)
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _reset_world(store: c10d.Store, rank: int, world_size: int) -> None:
    """Drop the groups, caches and random state of the last call, as in a new process."""
    group_count = c10d._world.group_count
    if dist.is_initialized():
        dist.destroy_process_group()
    # A mesh that outlived its call must not find a new group under its old group's name.
    c10d._world.group_count = group_count
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    tensor_random._rng_tracker = None
    gc.collect()
    # The remaining objects belong to modules; frozen, they do not cost 0.1 s in every later collection.
    gc.freeze()
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    random.seed(0)
    backend = "gloo"
    if os.environ["PHALANX_RANK_DEVICE"] == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
