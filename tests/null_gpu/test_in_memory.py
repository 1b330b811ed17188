"""An in-memory copy of a rank's state takes one wait, for any number of tensors."""

from __future__ import annotations

import ctypes

import pytest
import torch

from phalanx.launch.shared_memory import SLOTS_ENV, allocate_slots
from phalanx.train.checkpoint.in_memory import InMemoryCheckpointer


def test_in_memory_save_waits_once_and_copies_to_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {SLOTS_ENV: "", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    allocate_slots(1)
    checkpointer = InMemoryCheckpointer({}, None, torch.device("cuda", 0))
    for step, width in enumerate((10, 10, 1000), start=1):
        tensors = {f"weight{index}": torch.ones(width, 7 + index, device="cuda") for index in range(20)}
        before = host_syncs(), pageable_copies()
        checkpointer.save(step, {**tensors, "offloaded": torch.ones(9)}, {})
        assert (host_syncs(), pageable_copies()) == (before[0] + 1, before[1])


def host_syncs() -> int:
    return ctypes.c_uint64.in_dll(ctypes.CDLL(None), "null_host_syncs").value


def pageable_copies() -> int:
    return ctypes.c_uint64.in_dll(ctypes.CDLL(None), "null_pageable_copies").value
