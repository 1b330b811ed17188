"""Page-locked memory of a pretended CUDA."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from phalanx.parallel.comm.pinned_memory import pinned_zeros


def test_pinned_zeros_are_locked_as_long_as_a_view_of_them_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: dict[int, int] = {}

    def register(address: int, size_bytes: int, flags: int) -> int:
        locked[address] = size_bytes
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=locked.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: None)
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
