"""Page-locked memory, with a simulated CUDA."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from phalanx.parallel.comm import pinned_memory
from phalanx.parallel.comm.pinned_memory import pinned_zeros
from tests.helpers.pretended_cuda import record_locked_memory


def test_pinned_zeros_are_locked_as_long_as_a_view_of_them_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    locked = record_locked_memory(monkeypatch)
    tensor = pinned_zeros(torch.Size((3, 5)), torch.bfloat16)
    assert torch.equal(tensor, torch.zeros(3, 5, dtype=torch.bfloat16))
    assert locked == {tensor.data_ptr(): 2 * 15}  # not 32: no power of two
    view = tensor[1]
    del tensor
    gc.collect()
    assert len(locked) == 1
    del view
    gc.collect()
    assert not locked
    assert pinned_zeros(torch.Size((0, 5)), torch.float32).shape == (0, 5)


def test_pinned_zeros_are_pageable_where_cuda_locks_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CUDA stores the error; it must be cleared, or a later kernel fails with it."""
    pending: list[int] = []
    unlocked: list[int] = []

    def refuse(address: int, size_bytes: int, flags: int) -> int:
        pending.append(2)
        return 2  # cudaErrorMemoryAllocation

    def check_error(error: int) -> None:
        if error:
            raise torch.cuda.CudaError(error)

    def launch_kernel(*_: object, **__: object) -> None:
        if pending:
            raise RuntimeError(f"CUDA error: {pending.pop()}")

    runtime = SimpleNamespace(cudaHostRegister=refuse, cudaHostUnregister=unlocked.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    monkeypatch.setattr(torch.cuda, "CudaError", RefusalError)
    monkeypatch.setattr(torch, "ones", launch_kernel)
    pinned_memory._warn_once.cache_clear()
    tensors = [pinned_zeros(torch.Size((3, 5)), torch.bfloat16) for _ in range(2)]
    assert all(torch.equal(tensor, torch.zeros(3, 5, dtype=torch.bfloat16)) for tensor in tensors)
    assert capsys.readouterr().err.count("CUDA cannot lock memory (out of memory (2))") == 1
    del tensors
    gc.collect()
    assert not pending
    assert not unlocked


class RefusalError(RuntimeError):
    """Stands for torch.cuda.CudaError, which needs a CUDA build."""

    def __init__(self, code: int) -> None:
        super().__init__(f"out of memory ({code})")
