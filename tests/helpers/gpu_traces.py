"""Hand-written traces in the format of torch.profiler on a GPU: pytorch/kineto's libkineto/src/output_json.cpp.

Times are in microseconds."""

from __future__ import annotations

import gzip
import json
from itertools import count
from pathlib import Path
from typing import Any

Event = dict[str, Any]
ORIGIN = 4919844206101.94
"""Time of the first event; large, as in the traces of PyTorch 2.13."""
HOST, GPU = 4200, 0
GEMM = "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT"
FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, cutlass::bfloat16_t>>"
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>(int)"
ADAM = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>(int)"
RING = "ncclDevKernel_{}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
correlations = count(900)


def complete(category: str, name: str, start: float, end: float, **args: Any) -> Event:
    """Return a complete event; `args` are those of the trace."""
    pid = GPU if category in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation") else HOST
    event: Event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": args.get("stream", HOST)}
    return event | {"ts": ORIGIN + start, "dur": end - start, "args": args}


def launched(category: str, name: str, start: float, end: float, launch_end: float, **args: Any) -> list[Event]:
    """Return a GPU event, and the host call that launched it and took 4 us."""
    correlation = next(correlations)
    call = complete("cuda_runtime", "cudaLaunchKernel", launch_end - 4, launch_end, cbid=211, correlation=correlation)
    fields = {"External id": 7, "device": GPU, "context": 1, "stream": 7, "correlation": correlation} | args
    return [call, complete(category, name, start, end, **fields)]


def kernel(name: str, start: float, end: float, launch_end: float, stream: int = 7) -> list[Event]:
    """Return a compute kernel and its launch."""
    grid = {"grid": [132, 1, 1], "block": [128, 1, 1], "est. achieved occupancy %": 25}
    return launched("kernel", name, start, end, launch_end, stream=stream, **grid)


def nccl(kind: str, start: float, end: float, launch_end: float, **fields: Any) -> list[Event]:
    """Return an NCCL kernel with the fields of `record_param_comms`, and its launch."""
    return launched("kernel", RING.format(kind), start, end, launch_end, **{"stream": 20, **fields})


def group_fields(collective: str, group: str, description: str, size: int) -> Event:
    """Return the fields of a collective of a process group."""
    return {
        "Collective name": collective,
        "In msg nelems": 1024,
        "Out msg nelems": 1024 * size,
        "Group size": size,
        "dtype": "BFloat16",
        "In split size": "[]",
        "Out split size": "[]",
        "Process Group Name": group,
        "Process Group Description": description,
        "Process Group Ranks": "[0, 1]",
    }


def step_events(annotation: str) -> list[Event]:
    """Return a step of 1,000 us: matrix products, attention, two groups, a late launch, a copy and an update."""
    gather = group_fields("_allgather_base", "3", "mesh_dp_shard", 2)
    scatter = group_fields("_reduce_scatter_base", "3", "mesh_dp_shard", 2)
    reduce = group_fields("allreduce", "5", "mesh_tp", 2)
    events = [
        {"ph": "M", "name": "process_name", "ts": ORIGIN, "pid": HOST, "tid": 0, "args": {"name": "python"}},
        complete("cpu_op", "aten::mm", 1000, 1006, **{"External id": 7, "Ev Idx": 1}),
        complete("user_annotation", annotation, 1000, 2000, **{"External id": 1, "Ev Idx": 0}),
        complete("gpu_user_annotation", annotation, 1020, 1950, **{"External id": 1, "stream": 7}),
        complete("cuda_runtime", "cudaDeviceSynchronize", 1730, 1995, cbid=165, correlation=next(correlations)),
        *kernel(GEMM, 500, 990, launch_end=480),  # before the step
        *kernel(GEMM, 1020, 1200, launch_end=1010),
        *nccl("AllGather", 1100, 1300, launch_end=1015, **gather),
        *kernel(FLASH, 1250, 1400, launch_end=1018),
        *nccl("ReduceScatter_Sum_bf16", 1350, 1500, launch_end=1022, **scatter),
        *kernel(ELEMENTWISE, 1600, 1700, launch_end=1580),
        *nccl("AllReduce_Sum_bf16", 1700, 1750, launch_end=1585, **reduce),
        *launched("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1800, 1850, 1720, bytes=4096, stream=7),
        *kernel(ADAM, 1850, 1950, launch_end=1725),
        {"ph": "i", "name": "Record Window End", "s": "g", "pid": "", "tid": "", "ts": ORIGIN + 2100},
    ]
    return events[::-1]  # the order in a trace is arbitrary


def write_trace(file: Path, events: list[Event]) -> None:
    """Write a trace as `export_chrome_trace` does."""
    with gzip.open(file, "wt") as stream:
        json.dump({"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": events}, stream)
