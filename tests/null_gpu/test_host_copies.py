"""Copies of GPU tensors for a checkpoint do not block the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from phalanx.train.checkpoint.host_copies import HostCopies


@pytest.fixture
def no_syncs() -> Iterator[None]:
    """Raise an error in each PyTorch call that waits for the GPU."""
    torch.zeros(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def state() -> dict[str, Tensor]:
    on_gpu = {f"weight{index}": torch.ones(300, 7 + index, device="cuda") for index in range(4)}
    scalars = {"step": torch.ones((), device="cuda"), "offloaded": torch.ones(10)}
    return {**on_gpu, **scalars, "half": torch.ones(9, dtype=torch.bfloat16, device="cuda")}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.usefixtures("no_syncs")
def test_copies_of_gpu_tensors_are_queued() -> None:
    tensors, copies = state(), HostCopies()
    first = copies.copy(tensors)
    assert [(copy.shape, copy.dtype) for copy in first.values()] == [(t.shape, t.dtype) for t in tensors.values()]
    assert all(copy.device.type == "cpu" for copy in first.values())
    addresses = {name: copy.data_ptr() for name, copy in first.items() if tensors[name].is_cuda}
    second = copies.copy(tensors)
    assert {name: second[name].data_ptr() for name in addresses} == addresses
    assert second["offloaded"].data_ptr() != tensors["offloaded"].data_ptr()
    copies.wait()
    with pytest.raises(RuntimeError, match="synchronizing"):
        tensors["weight0"].to("cpu", copy=True)


def test_copies_are_pageable_where_cuda_locks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.cudart(), "cudaHostRegister", lambda *_: torch.cuda.cudart().cudaError(2))
    tensors, copies = state(), HostCopies()
    copied = copies.copy(tensors)
    copies.wait()
    assert not any(copy.is_pinned() for copy in copied.values())
    assert {name: copy.shape for name, copy in copied.items()} == {name: t.shape for name, t in tensors.items()}
