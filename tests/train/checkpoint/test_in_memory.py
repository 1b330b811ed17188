"""Slots of the in-memory checkpoints of a rank, which are locked if it computes on a GPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

from phalanx.launch.shared_memory import SLOTS_ENV, allocate_slots
from phalanx.train.checkpoint import in_memory
from phalanx.train.checkpoint.in_memory import InMemoryCheckpointer
from tests.helpers.pretended_cuda import record_locked_memory

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def slots(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Allocate the slots of one rank in this process."""
    for name, value in {SLOTS_ENV: "", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    allocate_slots(1)
    fds = os.environ[SLOTS_ENV].partition(":")[2].split(",")
    yield
    for fd in fds:
        os.close(int(fd))


def test_slots_are_locked_once_per_mapping_and_copies_awaited_once(monkeypatch: pytest.MonkeyPatch) -> None:
    locked, waits = record_locked_memory(monkeypatch), []
    monkeypatch.setattr(in_memory, "wait_for_host_copies", waits.append)
    checkpointer = InMemoryCheckpointer({}, None, GPU)
    for step, width in enumerate((10, 10, 10, 1000, 1000, 10), start=1):
        checkpointer.save(step, {name: torch.full((width, 3), float(step)) for name in "abc"}, {})
        assert waits == [GPU] * step
    local_slots = checkpointer._slots[:2]
    assert sorted(locked.values()) == sorted(len(slot.memory) for slot in local_slots)
    assert min(locked.values()) > 3 * 12 * 1000
    latest = checkpointer.load_latest()
    assert latest is not None
    assert latest.step == 6
    assert latest.tensors["c"].tolist() == [[6.0] * 3] * 10
    del checkpointer, local_slots
    gc.collect()
    assert len(locked) == 1  # of `latest`
    del latest
    gc.collect()
    assert not locked


@pytest.mark.parametrize("index", range(4))
def test_restored_copy_is_overwritten_by_second_next_save(index: int) -> None:
    """After a change of ranks, the copy may be in a slot for the neighbor."""
    InMemoryCheckpointer({}, None, CPU).save(3, {"a": torch.ones(3)}, {})
    checkpointer = InMemoryCheckpointer({}, None, CPU)
    slots = checkpointer._slots
    if index:
        slots[index].ensure_size(len(slots[0].memory))
        slots[index].memory[:] = slots[0].memory[:]
        slots[0].invalidate()
    assert checkpointer.load_latest() is not None
    written = [pair.next for pair in (checkpointer._local, checkpointer._neighbor)]
    assert slots[index] not in written


def test_slots_are_pageable_where_rank_computes_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    locked = record_locked_memory(monkeypatch)
    InMemoryCheckpointer({}, None, CPU).save(1, {"a": torch.ones(3)}, {})
    assert not locked
