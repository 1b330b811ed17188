"""On a full disk, checkpoints that the next one replaces are removed before it is written, and never the newest."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from phalanx.runs.checkpoints import checkpoints, find_damage
from phalanx.spec.errors import UserError
from phalanx.spec.run import KeepSpec
from phalanx.testing.fault_injection import NotAllowed, small_disk
from phalanx.train.checkpoint.checkpointer import Checkpointer, free_disk

MIB = 2**20
STATE = {"model.weight": torch.arange(2 * MIB, dtype=torch.uint8)}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a disk with room for two checkpoints and a half."""
    try:
        with small_disk(tmp_path / "disk", 5 * MIB):
            yield tmp_path / "disk" / "checkpoints"
    except NotAllowed as reason:
        pytest.skip(str(reason))


def save(checkpointer: Checkpointer, step: int) -> list[str]:
    checkpointer.save(step, STATE, {"evaluation": None})
    checkpointer.wait()
    saved = checkpoints(checkpointer.directory)
    assert [find_damage(path) for path in saved] == [None] * len(saved)
    return [path.name[-1] for path in saved]


def test_replaced_checkpoint_is_removed_before_the_new_one_is_written(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = Checkpointer(disk, KeepSpec(last=2))
    with caplog.at_level(logging.WARNING):
        assert [save(checkpointer, step) for step in (1, 2, 3)] == [["1"], ["2", "1"], ["3", "2"]]
    assert "step-00000001 is removed from it before the new one is written" in caplog.text


def test_newest_checkpoint_is_not_removed_for_a_new_one(disk: Path) -> None:
    (disk.parent / "others").write_bytes(bytes(2 * MIB))
    checkpointer = Checkpointer(disk, KeepSpec(last=1))
    assert save(checkpointer, 1) == ["1"]
    with pytest.raises(UserError, match=r"could not be written: .*No space left"):
        save(checkpointer, 2)
    assert [path.name[-1] for path in checkpoints(disk)] == ["1"]


def test_checkpoints_are_not_removed_early_from_a_disk_with_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = Checkpointer(tmp_path / "checkpoints", KeepSpec(last=2))
    with caplog.at_level(logging.WARNING):
        assert [save(checkpointer, step) for step in (1, 2, 3)] == [["1"], ["2", "1"], ["3", "2"]]
    assert not caplog.text


def test_checkpoint_that_is_being_uploaded_is_not_removed_for_a_new_one(tmp_path: Path) -> None:
    saved = [tmp_path / f"step-0000000{step}" for step in range(4)]
    for path in saved:
        path.mkdir()
    more_than_any_disk = 2**62
    free_disk(tmp_path / "step-00000004", more_than_any_disk, KeepSpec(last=1), uploading=saved[1])
    assert checkpoints(tmp_path) == [saved[3], saved[1]]
