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
    """All that a device has; of a CPU the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process has held: of the device on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if STATUS.exists():
        peak = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
