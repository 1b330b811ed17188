"""What the failure record says of a snapshot, without a GPU; tests/null_gpu/test_memory_snapshot.py writes one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx.runs.hang_dumps import memory_snapshot_file
from phalanx.train.guards.memory_snapshot import snapshot_entry


@pytest.mark.parametrize("message", ["shapes do not match", "[enforce fail] not enough memory"])
def test_snapshot_entry_is_empty_for_other_errors_and_cpu_memory(message: str, tmp_path: Path) -> None:
    assert snapshot_entry(RuntimeError(message), tmp_path, 0, is_recorded=True) == {}


def test_snapshot_entry_is_none_without_history(tmp_path: Path) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory")
    assert snapshot_entry(error, tmp_path, 0, is_recorded=False) == {"snapshot": None}


def test_snapshot_entry_is_empty_if_file_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "failures").write_text("a file where the folder should be")
    error = torch.OutOfMemoryError("CUDA out of memory")
    assert snapshot_entry(error, tmp_path, 3, is_recorded=True) == {}
    assert f"rank 3 could not write {memory_snapshot_file(tmp_path, 3)}" in capsys.readouterr().err
