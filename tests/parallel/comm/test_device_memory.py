"""Peak memory is what this process has really allocated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from phalanx.parallel.comm.device_memory import peak_memory_bytes

SIZE = 200_000_000
PRINT_PEAK_PROGRAM = (
    "import torch; from phalanx.parallel.comm.device_memory import peak_memory_bytes; "
    "print(peak_memory_bytes(torch.device('cpu')))"
)


def resident_bytes() -> int:
    if not Path("/proc/self/statm").exists():
        pytest.skip("no /proc on this system")
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_peak_memory_bytes_grows_with_allocation_and_does_not_drop() -> None:
    cpu, before = torch.device("cpu"), resident_bytes()
    touched = torch.ones(SIZE, dtype=torch.uint8)
    peak = peak_memory_bytes(cpu)
    assert peak > before + 0.95 * SIZE
    del touched
    assert peak_memory_bytes(cpu) > peak - SIZE / 100  # the kernel counts pages in batches


def test_peak_memory_bytes_excludes_peak_of_parent_process() -> None:
    """Linux's ru_maxrss includes it after fork and exec."""
    size = 3 * SIZE
    held = torch.ones(size, dtype=torch.uint8)
    child = subprocess.run([sys.executable, "-c", PRINT_PEAK_PROGRAM], capture_output=True, text=True, check=True)
    assert int(child.stdout) < len(held)


def test_peak_memory_bytes_of_gpu_includes_memory_outside_the_allocator(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 40)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (53, 100))
    assert peak_memory_bytes(torch.device("cuda", 0)) == 50 + (100 - 53 - 40)
