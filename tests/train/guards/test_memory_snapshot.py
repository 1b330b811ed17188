"""Entry of a snapshot in the failure record, without a GPU; tests/null_gpu/test_memory_snapshot.py writes one."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.runs.hang_dumps import memory_snapshot_file, remove_dumps
from phalanx.train.guards.memory_snapshot import snapshot_entry


def test_snapshot_entry_is_none_without_history(tmp_path: Path) -> None:
    assert snapshot_entry(tmp_path, 0, is_recorded=False) == {"snapshot": None}


def test_snapshot_entry_is_empty_if_file_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "failures").write_text("a file where the folder should be")
    assert snapshot_entry(tmp_path, 3, is_recorded=True) == {}
    assert f"{memory_snapshot_file(tmp_path, 3)} could not be written" in capsys.readouterr().err


def test_snapshot_of_an_earlier_start_is_kept_with_its_failure(tmp_path: Path) -> None:
    file = memory_snapshot_file(tmp_path, 3)
    file.parent.mkdir()
    file.write_bytes(b"allocations")
    remove_dumps(tmp_path, 3)
    assert [kept.read_bytes() for kept in (tmp_path / "failures" / "earlier").glob("rank-00003-*.pickle")] == [
        b"allocations"
    ]
