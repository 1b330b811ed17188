"""Memory of a device: in all, and at its peak."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

# On Linux getrusage's peak is at least that of the process which started this one, before exec.
STATUS = Path("/proc/self/status")


def device_memory_bytes(device: torch.device) -> int:
    """Return the memory of a device; of a CPU, that of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the maximum memory of this process: resident on a CPU; of a GPU, what PyTorch's allocator reserved, and
    what the driver, NCCL and other processes on the same GPU use."""
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        outside_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(device)
        return torch.cuda.max_memory_reserved(device) + max(0, outside_bytes)
    if STATUS.exists():
        peak = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
