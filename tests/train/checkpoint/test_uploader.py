"""Errors of uploads are reported as events, and later checkpoints are uploaded all the same."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.runs.events import UPLOAD_FAILED, read_events
from phalanx.spec.run import KeepSpec
from phalanx.train.checkpoint import uploader
from phalanx.train.checkpoint.uploader import CheckpointUploader


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of one checkpoint, for a store that accepts everything."""
    folder = tmp_path / "checkpoints"
    (folder / "step-00000001").mkdir(parents=True)
    monkeypatch.setattr(uploader, "remove_stored_step", lambda *_: None)
    monkeypatch.setattr(uploader, "remove_stored", lambda *_, **__: None)
    monkeypatch.setattr(uploader, "complete_upload", lambda path, *_: (path / "objects.json").touch())
    return folder


def fail(*_: Any, **__: Any) -> None:
    raise OSError("the disk is gone")


def failed_uploads(directory: Path) -> list[tuple[str, str]]:
    events = read_events(directory.parent)
    return [(event["checkpoint"], event["problem"]) for event in events if event["kind"] == UPLOAD_FAILED]


def test_upload_is_repeated_after_an_error_before_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(uploader, "checkpoints_to_keep", fail)
        uploads = CheckpointUploader(directory, "s3://bucket/run", KeepSpec(), lambda: None)
        uploads.request()
        deadline = time.monotonic() + 10
        while not failed_uploads(directory) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert failed_uploads(directory) == [("step-00000001", "the disk is gone")]
    assert uploads.finish(10) == []


@pytest.mark.parametrize("failing", ["store", "local copies"])
def test_errors_of_removals_do_not_end_uploads(directory: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    (directory / "step-00000002").mkdir()
    remove_old_copies = fail if failing == "local copies" else lambda: None
    uploads = CheckpointUploader(directory, "s3://bucket/run", KeepSpec(last=2), remove_old_copies)
    if failing == "store":
        names = ["step-00000002", "step-00000001", None]
        monkeypatch.setattr(uploads, "_choose_next", lambda _: names.pop(0))
        monkeypatch.setattr(uploader, "checkpoints_to_keep", fail)
    assert uploads.finish(10) == []
    assert failed_uploads(directory) == []
    assert uploads.current is None


def test_wait_for_uploads_ends_early_and_is_progress(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader, "POLL_SECONDS", 0.01)
    release = threading.Event()
    monkeypatch.setattr(uploader, "remove_stored_step", lambda *_: release.wait(10))
    uploads = CheckpointUploader(directory, "s3://bucket/run", KeepSpec(), lambda: None)
    assert uploads.finish(100, should_end=lambda: uploads.num_polls == 3) == ["step-00000001"]
    release.set()


def test_end_of_uploads_is_an_event(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader, "all_gather_objects", fail)
    uploads = CheckpointUploader(directory, "s3://bucket/run", KeepSpec(), lambda: None)
    assert uploads.finish(10) == ["step-00000001"]
    assert failed_uploads(directory) == [("step-00000001", "the disk is gone")]
    assert uploads.current is None
