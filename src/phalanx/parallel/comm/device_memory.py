"""Total and peak memory of a device."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

# On Linux getrusage's peak is at least that of the parent process before exec.
STATUS = Path("/proc/self/status")


def device_memory_bytes(device: torch.device) -> int:
    """Return the memory of a device; for a CPU, that of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process.

    On a CPU, this is the resident memory. On a GPU, it is the memory that PyTorch's allocator reserved, and the memory
    of the driver, NCCL and other processes on the same GPU."""
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        outside_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(device)
        return torch.cuda.max_memory_reserved(device) + max(0, outside_bytes)
    if STATUS.exists():
        peak = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
