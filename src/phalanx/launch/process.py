"""What ranks find when they start, how they join and leave, and the word that they leave of a failure."""

from __future__ import annotations

import ctypes
import logging
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from phalanx.launch.fork_server import PR_SET_PDEATHSIG
from phalanx.launch.warm_process import WORKER_ENVIRONMENT
from phalanx.spec.errors import EXIT_INTERRUPTED, EXIT_STOPPED, LocalNodeError
from phalanx.spec.malloc_tuning import tune_malloc
from phalanx.spec.open_files import raise_open_files_limit
from phalanx.spec.run import RunSpec

FORCE_EXIT_SECONDS = 5.0
MAX_TRIM_THRESHOLD_BYTES = 2**31 - 1
"""That mallopt(3) takes: an int."""


ALLOCATOR_VARIABLES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""PyTorch's names for the settings of the GPU's allocator: today's, and the one before it."""


LAUNCHER_PID_ENV = "PHALANX_LAUNCHER"
"""Names to ranks the process that waits for them, reads what they leave in failures/, and prints the first."""


def select_device(run: RunSpec) -> str:
    """ "cuda" or "cpu".

    Raises UserError if the run asks for a GPU that is not there, or in a precision that it lacks.
    """
    requested = run.cluster.device
    if requested != "cpu":
        set_gpu_environment()
    if requested == "cuda" and not torch.cuda.is_available():
        raise LocalNodeError(
            "cluster.device", "cuda", "PyTorch sees no GPU here", fix='set cluster.device = "cpu" or "auto"'
        )
    return "cuda" if requested != "cpu" and torch.cuda.is_available() else "cpu"


def select_nproc(run: RunSpec, requested: int | None = None) -> int:
    """Ranks to start on this node: as asked, as the run file says, or one per GPU (one on a CPU).

    Raises UserError if there are fewer GPUs than ranks.
    """
    gpus = torch.cuda.device_count() if select_device(run) == "cuda" else 0
    nproc = requested or run.cluster.nproc_per_node or max(1, gpus)
    if gpus and nproc > gpus:
        raise LocalNodeError(
            "--nproc", nproc, f"this machine has {gpus} GPUs", fix=f'use at most {gpus}, or cluster.device = "cpu"'
        )
    return nproc


def set_worker_environment(nproc: int) -> None:
    """What processes must find set when they start; what the user has set stays."""
    threads = str(max(1, (os.cpu_count() or 1) // nproc))
    for name, value in {**WORKER_ENVIRONMENT, "OMP_NUM_THREADS": threads}.items():
        os.environ.setdefault(name, value)


def set_gpu_environment() -> None:
    """Set what CUDA and PyTorch read when a process first looks for a GPU; what the user has set stays."""
    # Streams that share a hardware queue (8 by default) wait for each other. A pipeline has a stream for each pair of
    # ranks and direction: a send behind a receive whose sender waits for that send would never start. FSDP2 has four
    # streams more, and is recommended 16 or 32 with tensor parallelism too (torchtitan, docs/composability.md).
    # Megatron-LM sets 1, by which its tensor parallelism's communication starts before the products that hide it:
    # whoever runs nothing but tensor parallelism may try that.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # Blocks grow in place of new ones of other sizes, so that less memory is reserved and not used. It excludes handles
    # of cudaIpcGetMemHandle and TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK, of which Phalanx uses neither.
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def run_in_place(module: str, *arguments: str) -> NoReturn:
    """Have this process go on as `python -m MODULE ARGUMENTS`, with what it has imported."""
    keep_freed_memory()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


def keep_freed_memory() -> None:
    """Set what WORKER_ENVIRONMENT sets of the allocator for a process that has begun without it."""
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        tune_malloc(MAX_TRIM_THRESHOLD_BYTES, int(WORKER_ENVIRONMENT["MALLOC_MMAP_THRESHOLD_"]))


def env_rank() -> int:
    """As torchrun's environment has it, also before ranks have joined; 0 without one."""
    return int(os.environ.get("RANK", "0"))


def init_distributed(device_type: str, timeout_seconds: float, num_ranks: int | None = None) -> torch.device:
    """Join the process group that torchrun's environment describes, if any, or that of its first `num_ranks` ranks;
    returns this rank's device."""
    die_with_launcher()
    device = torch.device("cpu")
    if device_type == "cuda":
        set_gpu_environment()
        # Slurm may show each rank only its own GPU.
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Gloo has a socket for each other rank, in each group. TORCH_GLOO_LAZY_INIT=1 opens a third of them, but then
        # two of three starts of 32 ranks hung in their first all-reduce (torch 2.13).
        raise_open_files_limit()
        enable_flight_recorder()
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        timeout = timedelta(seconds=timeout_seconds)
        # -1: as the environment says
        rank, num_ranks = (-1, -1) if num_ranks is None else (int(os.environ["RANK"]), num_ranks)
        dist.init_process_group(backend, timeout=timeout, rank=rank, world_size=num_ranks)
        # Groups that are made later, those of a mesh among them, take PyTorch's own timeouts: half an hour on gloo.
        c10d: Any = dist.distributed_c10d
        c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout
    return device


def use_deterministic_kernels() -> None:
    """Have PyTorch use only kernels that give the same bits each time, or raise RuntimeError; before a GPU is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS's own condition
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def die_with_launcher() -> None:
    """Where `launch_ranks` waits for this rank, end with it, by SIGKILL: torchrun's agent gives each rank a session of
    its own, and one that outlived the agent would train on unseen, in the way of the run's next start."""
    launcher = int(os.environ.get(LAUNCHER_PID_ENV, "0"))
    if launcher and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it ended before the kernel was asked
            os._exit(1)


def exit_rank(exit_code: int) -> None:
    """End this process. Interpreter shutdown beside gloo's threads aborts now and then, so it is skipped."""
    if dist.is_initialized() and exit_code in (0, EXIT_STOPPED):
        dist.barrier()
        dist.destroy_process_group()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def stop_signals() -> list[signal.Signals]:
    """Those that end a run in order; SIGHUP unless nohup has it ignored."""
    hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    return [signal.SIGTERM, signal.SIGINT, *hangup]


@contextmanager
def handling_signals(on_signal: Callable[[int], None]) -> Iterator[None]:
    """Call `on_signal` on SIGTERM (Slurm, torchrun), Ctrl-C and a closed terminal, so that the process can end in
    order; one more, some seconds later, ends it at once. (Ctrl-C reaches a rank twice: from the terminal and from
    torchrun.)"""
    first_signal_at: float | None = None

    def handle_signal(number: int, _: object) -> None:
        nonlocal first_signal_at
        first_signal_at = first_signal_at or time.monotonic()
        if time.monotonic() - first_signal_at > FORCE_EXIT_SECONDS:
            os._exit(EXIT_INTERRUPTED)
        on_signal(number)

    previous_handlers = {number: signal.signal(number, handle_signal) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def enable_flight_recorder() -> None:
    """Have them remembered: before there is a process group. What the user has set stays."""
    os.environ.setdefault(BUFFER_VARIABLE, str(MAX_RECORDED_COLLECTIVES))


BUFFER_VARIABLE = "TORCH_FR_BUFFER_SIZE"
MAX_RECORDED_COLLECTIVES = 2000
"""Collectives that a rank remembers."""
