"""Simulated CUDA runtime that page-locks no memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch


def record_locked_memory(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Simulate CUDA; return the locked bytes by address.

    Locking memory twice raises AssertionError, and so does unlocking memory that is not mapped anymore."""
    locked: dict[int, int] = {}

    def register(address: int, size_bytes: int, flags: int) -> int:
        assert address not in locked
        locked[address] = size_bytes
        return 0

    def unregister(address: int) -> None:
        assert is_mapped(address)
        del locked[address]

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: None)
    return locked


def is_mapped(address: int) -> bool:
    """Return whether this process has memory at an address."""
    with open("/proc/self/maps") as maps:
        ranges = (line.split()[0].split("-") for line in maps)
        return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)
