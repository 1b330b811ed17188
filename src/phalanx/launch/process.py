"""Environment, start and exit of rank processes."""

from __future__ import annotations

import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from phalanx.launch.rendezvous import address_towards, set_socket_interface
from phalanx.launch.starters import set_rank_variables
from phalanx.launch.warm_process import WORKER_ENVIRONMENT
from phalanx.spec.errors import EXIT_INTERRUPTED, EXIT_STOPPED, LocalNodeError, UserError
from phalanx.spec.malloc_tuning import tune_malloc
from phalanx.spec.open_files import raise_open_files_limit
from phalanx.spec.parent_process import end_with_parent
from phalanx.spec.run import RunSpec

logger = logging.getLogger(__name__)

FORCE_EXIT_SECONDS = 5.0
MAX_TRIM_THRESHOLD_BYTES = 2**31 - 1
"""Maximum value that mallopt(3) accepts: an int."""
ALLOCATOR_VARIABLES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""PyTorch's variables for the settings of the GPU allocator: the current name and the previous one."""
FP8_CAPABILITY = 9.0
"""Minimum compute capability of `torch._scaled_mm` with a scale per row."""
NVIDIA_SMI_SECONDS = 20.0
LAUNCHER_PID_ENV = "PHALANX_LAUNCHER"
"""Variable with the process id of the launcher, which waits for ranks, reads failures/ and prints the first failure."""


def select_device(run: RunSpec) -> str:
    """Return the device, "cuda" or "cpu".

    Raises UserError if the run requires a GPU that is absent or does not support its precision.
    """
    requested = run.cluster.device
    if requested != "cpu":
        set_gpu_environment()
    if requested == "cuda" and not torch.cuda.is_available():
        problem = "is not available: PyTorch finds no GPU on this machine"
        fix = (
            "run it on a machine with GPUs; to check the file here, use phalanx plan, launch or dryrun; to train on "
            'this CPU, set cluster.device = "cpu"'
        )
        raise LocalNodeError("cluster.device", "cuda", problem, fix)
    return "cuda" if requested != "cpu" and torch.cuda.is_available() else "cpu"


def select_nproc(run: RunSpec, requested: int | None = None) -> int:
    """Return the number of ranks to start on this node.

    The number is the requested one, that of the run file, or one per GPU (one on a CPU). Raises UserError if there are
    fewer GPUs than ranks.
    """
    gpus = torch.cuda.device_count() if select_device(run) == "cuda" else 0
    check_fp8_capability(run)
    nproc = requested or run.cluster.nproc_per_node or max(1, gpus)
    if gpus and nproc > gpus:
        problem = f"exceeds the {gpus} GPUs of this machine"
        raise LocalNodeError("--nproc", nproc, problem, f'use at most {gpus}, or set cluster.device = "cpu"')
    return nproc


def check_fp8_capability(run: RunSpec) -> None:
    """Raise LocalNodeError if a run in fp8 uses a GPU without products in float8 with a scale per row."""
    if run.training.precision != "fp8" or select_device(run) != "cuda":
        return
    if torch.version.hip is not None:
        problem = "requires NVIDIA GPUs: AMD's have another float8"
        raise LocalNodeError("training.precision", "fp8", problem, 'set training.precision = "bf16"')
    for capability in query_gpus("compute_cap"):
        if capability < FP8_CAPABILITY:
            required = f"requires compute capability {FP8_CAPABILITY} or above"
            problem = f"{required}, and a GPU of this machine has {capability}"
            fix = 'set training.precision = "bf16", or use H100 GPUs or later ones'
            raise LocalNodeError("training.precision", "fp8", problem, fix)


def query_gpus(field: str) -> list[float]:
    """Return a number of `nvidia-smi --query-gpu` per visible GPU, without a CUDA context in this process.

    GPUs without a number, such as "[N/A]", are skipped. Indices in CUDA_VISIBLE_DEVICES are taken as those of
    nvidia-smi, which CUDA_DEVICE_ORDER=PCI_BUS_ID guarantees on machines with unequal GPUs."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", ""):
        command.append(f"--id={visible}")
    lines: list[str] = []
    with suppress(OSError, subprocess.SubprocessError):
        output = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True).stdout
        lines = output.splitlines()
    numbers: list[float] = []
    for line in lines:
        with suppress(ValueError):
            numbers.append(float(line))
    return numbers


def set_worker_environment(nproc: int) -> None:
    """Set the environment variables that ranks need at start-up, except those that the user has set."""
    threads = str(max(1, (os.cpu_count() or 1) // nproc))
    for name, value in {**WORKER_ENVIRONMENT, "OMP_NUM_THREADS": threads}.items():
        os.environ.setdefault(name, value)


def set_gpu_environment() -> None:
    """Set the variables that CUDA and PyTorch read at first GPU use, except those that the user has set."""
    # Streams that share a hardware queue (8 by default) wait for each other. A pipeline has a stream for each pair of
    # ranks and direction: a send queued after a receive whose sender waits for that send would never start. FSDP2 has
    # four more streams, and 16 or 32 are recommended with tensor parallelism too (torchtitan, docs/composability.md).
    # Megatron-LM sets 1, so that tensor-parallel communication starts before the products that overlap with it. Users
    # of tensor parallelism alone may try that value.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # Expandable segments instead of new blocks of other sizes reduce unused reserved memory. They exclude handles of
    # cudaIpcGetMemHandle and TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK; Phalanx uses neither.
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def run_in_place(module: str, *arguments: str) -> NoReturn:
    """Continue this process as `python -m MODULE ARGUMENTS`, with the modules that it has imported."""
    keep_freed_memory()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


def keep_freed_memory() -> None:
    """Apply the allocator settings of WORKER_ENVIRONMENT to a process that started without them."""
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        tune_malloc(MAX_TRIM_THRESHOLD_BYTES, int(WORKER_ENVIRONMENT["MALLOC_MMAP_THRESHOLD_"]))


def env_rank() -> int:
    """Return the rank in the process group, or before ranks have joined in torchrun's environment; 0 without one."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def env_world_size() -> int:
    """Return the number of ranks, as `env_rank` does; 1 without a process group and torchrun's environment."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def open_store() -> Store | None:
    """Return a new store of all ranks that another program started; wait for them. None for a single rank.

    All ranks must open the same number of stores. Raises UserError if another program uses the port of rank 0."""
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
    elif not set_rank_variables(os.environ):
        return None
    else:
        store = _rank_store(os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT", ""))
    # torchrun may keep its store for a restart, with the keys and addresses of ranks that are gone.
    store = PrefixStore(f"phalanx/start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return PrefixStore(f"{store.add(f'stores of rank {env_rank()}', 1)}", store)


@cache
def _rank_store(_host: str, port: str) -> Store:
    """Return the store at the address of rank 0.

    It remains for the next start in these processes: a rank must not find the store of the last start, which closes
    when rank 0 leaves it."""
    try:
        return cast(Store, next(rendezvous("env://"))[0])
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        fix = "set MASTER_PORT to a free port, the same for all ranks"
        raise UserError("MASTER_PORT", port, "is in use on this machine", fix) from None


def init_distributed(
    device_type: str | None = None,
    timeout_seconds: float = 600.0,
    num_ranks: int | None = None,
    store: Store | None = None,
) -> torch.device:
    """Initialize the process group of the ranks that torchrun, srun or mpirun started, or use the existing one.

    Args:
        device_type: "cpu" (gloo) or "cuda" (NCCL). By default "cuda" if PyTorch sees a GPU.
        timeout_seconds: The time that a collective may take, in this group and in those made later.
        num_ranks: The number of ranks, if only the first of those that torchrun started join.
        store: The store of the ranks, if they have met already (`open_store`).

    Returns:
        The device of this rank.

    Raises:
        UserError: The address of rank 0 is unknown, or the existing process group lacks a backend.

    Example:
        >>> phalanx.init_distributed("cpu")
        device(type='cpu')
    """
    die_with_launcher()
    if not dist.is_initialized():
        set_rank_variables(os.environ)
    if device_type is None:
        set_gpu_environment()
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cpu")
    if device_type == "cuda":
        set_gpu_environment()
        # Slurm may expose to each rank only its own GPU.
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if dist.is_initialized():
        _check_backends(device_type)
    elif env_world_size() > 1:
        # Gloo has a socket for each other rank, in each group. TORCH_GLOO_LAZY_INIT=1 opens a third of them, but with
        # it two of three starts of 32 ranks hung in their first all-reduce (torch 2.13).
        raise_open_files_limit()
        enable_flight_recorder()
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        timeout = timedelta(seconds=timeout_seconds)
        # torchrun's agent chooses an address of this node. Without it, gloo uses that of the host name.
        if (
            "TORCHELASTIC_RUN_ID" not in os.environ
            and os.environ.get("LOCAL_WORLD_SIZE", "1") != os.environ["WORLD_SIZE"]
        ):
            with suppress(UserError, OSError):
                set_socket_interface(address_towards(os.environ["MASTER_ADDR"]))
        ranks = num_ranks or env_world_size()
        started_at = time.perf_counter()
        dist.init_process_group(backend, timeout=timeout, rank=env_rank(), world_size=ranks, store=store)
        seconds = time.perf_counter() - started_at
        logger.debug("process group of %d ranks (%s) made in %.2f s", ranks, backend, seconds)
        # Later groups, including those of a mesh, have PyTorch's own timeouts: half an hour on gloo.
        c10d: Any = dist.distributed_c10d
        c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout
    return device


@contextmanager
def leaving_process_group() -> Iterator[None]:
    """Destroy the process group that this context initializes, once all ranks have left it without an error."""
    is_callers = dist.is_initialized()
    try:
        yield
        # Rank 0 has written its files, and no rank's messages are under way.
        if dist.is_initialized():
            dist.barrier()
    finally:
        if not is_callers and dist.is_initialized():
            dist.destroy_process_group()


def _check_backends(device_type: str) -> None:
    """Raise UserError if the caller's process group cannot send tensors of the CPU, or of the device."""
    backends = dist.get_backend_config()
    if not all(f"{kind}:" in backends for kind in {"cpu", device_type}):
        problem = "has no backend for the tensors of the CPU and the device"
        fix = 'call init_process_group with backend="cpu:gloo,cuda:nccl", or without backend'
        raise UserError("process group", backends, problem, fix)


def use_deterministic_kernels() -> None:
    """Make PyTorch use only bitwise reproducible kernels, or raise RuntimeError.

    Call it before a GPU is used.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def die_with_launcher() -> None:
    """Send SIGKILL to this rank when its launcher exits, if `launch_ranks` started it.

    torchrun's agent starts each rank in its own session. A rank that outlived the agent would train on unnoticed and
    block the next start of the run.
    """
    launcher = int(os.environ.get(LAUNCHER_PID_ENV, "0"))
    if launcher and sys.platform == "linux":
        end_with_parent()
        # The launcher has exited before the request reached the kernel.
        if os.getppid() != launcher:
            os._exit(1)


def exit_rank(exit_code: int) -> None:
    """End this process without interpreter shutdown, which occasionally aborts while gloo's threads run."""
    if dist.is_initialized() and exit_code in (0, EXIT_STOPPED):
        dist.barrier()
        dist.destroy_process_group()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


STOP_SECONDS = 600
"""Seconds between SIGTERM and SIGKILL for an orderly stop of ranks: time for a step and a checkpoint."""


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run in order; SIGHUP unless nohup ignores it."""
    hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    return [signal.SIGTERM, signal.SIGINT, *hangup]


@contextmanager
def handling_signals(on_signal: Callable[[int], None]) -> Iterator[None]:
    """Call `on_signal` on SIGTERM (Slurm, torchrun), Ctrl-C and a closed terminal, for an orderly exit.

    A second signal some seconds later ends the process at once. (A rank receives Ctrl-C twice: from the terminal and
    from torchrun.) No-op off the main thread, which alone may handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
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
    """Enable NCCL's flight recorder, before a process group exists.

    Variables that the user has set are unchanged.
    """
    os.environ.setdefault(BUFFER_VARIABLE, str(MAX_RECORDED_COLLECTIVES))


BUFFER_VARIABLE = "TORCH_FR_BUFFER_SIZE"
MAX_RECORDED_COLLECTIVES = 2000
"""Maximum number of collectives in a rank's flight recorder."""
