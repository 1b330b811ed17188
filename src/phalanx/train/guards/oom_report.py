"""Report of a rank's memory after an out-of-memory error."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import torch

from phalanx.debug.oom import cgroup_memory_limit
from phalanx.parallel.comm.device_memory import STATUS, peak_memory_bytes
from phalanx.parallel.dtensor_shards import local_tensor
from phalanx.train.trainer import Trainer

# Messages of PyTorch's CPU allocators, and of CUDA errors without a class of their own.
OOM_MESSAGES = ("can't allocate memory", "not enough memory", "CUDA out of memory", "Cannot allocate memory")
UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is an out-of-memory error."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(message in str(error) for message in OOM_MESSAGES)


def oom_report(error: BaseException, trainer: Trainer | None) -> dict[str, Any]:
    """Return the requested bytes and this rank's memory in bytes, for a failure record.

    The report is empty for any other error."""
    if not is_out_of_memory(error):
        return {}
    device = trainer.device if trainer is not None else torch.device("cpu")
    total = torch.cuda.memory_allocated(device) if device.type == "cuda" else _resident_bytes()
    bytes_by_part = resident_bytes_by_part(trainer) if trainer is not None else {}
    other_bytes = max(0, total - sum(bytes_by_part.values()))
    resident_bytes = {**bytes_by_part, "rest": other_bytes, "total": total, "peak": peak_memory_bytes(device)}
    if device.type == "cuda":
        resident_bytes["reserved"] = torch.cuda.memory_reserved(device)
    wanted_bytes = requested_bytes(str(error))
    return {"held_bytes": resident_bytes, "wanted_bytes": wanted_bytes, "limit_bytes": cgroup_memory_limit()}


def resident_bytes_by_part(trainer: Trainer) -> dict[str, int]:
    """Return the bytes of each part of the state on this rank's device; each storage counts once."""
    counted_storages: set[int] = set()
    sizes = {}
    for part, tensors in trainer.resident_tensors(trainer.optimizers).items():
        sizes[part] = 0
        for tensor in tensors:
            storage = local_tensor(tensor.detach()).untyped_storage()
            if storage.data_ptr() not in counted_storages and storage.device.type == trainer.device.type:
                counted_storages.add(storage.data_ptr())
                sizes[part] += storage.nbytes()
    return sizes


def requested_bytes(message: str) -> int | None:
    """Return the requested bytes in an allocator's message; None if it contains none."""
    match = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMG]iB|B)", message)
    return round(float(match[1]) * UNITS[match[2]]) if match else None


def _resident_bytes() -> int:
    with suppress(OSError, StopIteration):
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024
    return peak_memory_bytes(torch.device("cpu"))
