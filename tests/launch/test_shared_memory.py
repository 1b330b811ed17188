"""Slots of in-memory checkpoints, in memory that the launcher owns."""

from __future__ import annotations

from pathlib import Path

from phalanx.launch.shared_memory import SharedMemorySlot, SlotHeader, SlotPair


def make_slot(file: Path) -> SharedMemorySlot:
    file.touch()
    return SharedMemorySlot(file)


def test_slot_has_no_complete_copy_until_it_is_committed(tmp_path: Path) -> None:
    slot = make_slot(tmp_path / "slot")
    assert not slot.header.is_complete
    slot.invalidate()
    assert not slot.header.is_complete
    slot.commit(SlotHeader(7, 3, metadata_bytes=20))
    assert slot.header == SlotHeader(step=7, rank=3, metadata_bytes=20)
    assert slot.header.copy_id == (7, 3)
    slot.invalidate()
    assert slot.header == SlotHeader()


def test_slot_pair_overwrites_the_older_copy(tmp_path: Path) -> None:
    first, second = (make_slot(tmp_path / name) for name in "ab")
    pair = SlotPair(first, second)
    assert pair.next is first
    pair.flip()
    assert (pair.current, pair.next) == (first, second)
    pair.make_current(1)
    assert (pair.current, pair.next) == (second, first)
