"""Dumps of the watchdog: kept if the rank failed, removed if it continued, and with the collectives of each backend."""

from __future__ import annotations

import pickle
import threading
import time
from pathlib import Path
from traceback import FrameSummary, StackSummary
from types import SimpleNamespace
from typing import Any

import pytest
import torch._C._distributed_c10d as c10d

from phalanx.debug.hang_analysis import diagnose_hang
from phalanx.runs.hang_dumps import dump_file, fault_file, read_dumps
from phalanx.spec.parallel_dims import ParallelDims
from phalanx.testing.processes import WAIT_SECONDS, wait_until
from phalanx.train.guards import flight_recorder, watchdog
from phalanx.train.guards.watchdog import Watchdog
from tests.helpers.hang_dumps import BUSY, WAITING, make_dump


@pytest.fixture(autouse=True)
def preserve_pytest_faulthandler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep pytest's own fault handler."""
    monkeypatch.setattr(watchdog, "_install_abort_handler", lambda file: None)
    monkeypatch.setattr(watchdog.faulthandler, "disable", lambda: None)


def test_watchdog_preserves_failure_dump_when_collectives_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog sees progress just when the rank fails, because a collective ends when it times out."""
    has_looked = threading.Event()

    def changing_fingerprint() -> bytes:
        if not dump_file(tmp_path, 0).exists():
            return b""
        has_looked.set()
        wait_until(lambda: "error" in read_dumps(tmp_path)[0], "the failure is written down")
        return b"moved"

    monkeypatch.setattr(watchdog, "recorder_fingerprint", changing_fingerprint)
    watchdog_context = Watchdog(tmp_path, timeout_seconds=0.1)

    def fail() -> None:
        assert has_looked.wait(WAIT_SECONDS), "it hangs"
        raise RuntimeError("gloo: Timed out waiting for others")

    with pytest.raises(RuntimeError), watchdog_context:
        fail()
    watchdog_context._thread.join()
    assert "Timed out" in read_dumps(tmp_path)[0]["error"]


def test_watchdog_takes_wait_for_uploads_for_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "recorder_fingerprint", lambda: b"")
    strategy = SimpleNamespace(comm_wait=SimpleNamespace(seconds=0.0))
    checkpointer = SimpleNamespace(num_upload_polls=0)
    context: Any = Watchdog(tmp_path, timeout_seconds=0.4)
    context.trainer = SimpleNamespace(step=1, strategy=strategy, checkpointer=checkpointer, stop_requested=False)
    with context:
        for _ in range(50):
            checkpointer.num_upload_polls += 1
            time.sleep(0.02)
            assert not dump_file(tmp_path, 0).exists()


@pytest.mark.parametrize("others", [[], ["rank-00001.fault"]])
def test_watchdog_leaves_no_empty_directory_of_hangs(tmp_path: Path, others: list[str]) -> None:
    folder = dump_file(tmp_path, 0).parent
    with Watchdog(tmp_path, timeout_seconds=60):
        assert folder.is_dir()
        for name in others:
            (folder / name).touch()
    assert folder.exists() == bool(others)
    assert [file.name for file in folder.glob("*")] == others


def test_watchdog_does_not_write_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    fault_file(tmp_path, 0).parent.mkdir()
    fault_file(tmp_path, 0).symlink_to(target)
    with Watchdog(tmp_path, timeout_seconds=60):
        assert not fault_file(tmp_path, 0).is_symlink()
    assert target.read_text() == "mine"


def test_flight_recorder_numbers_gloo_and_nccl_collectives_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the group of all ranks has both backends: the first collective of one is not compared with the first of
    the other."""
    sizes = ParallelDims(dp_shard=2)
    gloo, nccl = recorder_entry("gloo:broadcast", over=True), recorder_entry("nccl:all_reduce", over=False)
    here, late = recorded_collectives(monkeypatch, [gloo], [nccl]), recorded_collectives(monkeypatch, [gloo], [])
    dumps = {0: make_dump(0, sizes, here, WAITING), 1: make_dump(1, sizes, late, BUSY)}
    for dump in dumps.values():
        dump["groups"] = {call["group"]: [0, 1] for call in here}
    verdict = diagnose_hang(dumps, {}, sizes).verdict
    assert (verdict.kind, verdict.ranks) == ("absent", (1,))
    assert "rank 0 (dp=0) waited in all_reduce of [4] Float, number 1 of all ranks" in verdict.summary


def recorder_entry(name: str, over: bool) -> dict[str, Any]:
    """Return the first collective of all ranks, as PyTorch's recorders describe it."""
    entry = {"process_group": ("0", "default_pg"), "collective_seq_id": 1, "profiling_name": name, "is_p2p": False}
    entry |= {"input_sizes": [[4]], "output_sizes": [[4]], "input_dtypes": ["Float"], "state": "scheduled"}
    return {**entry, "retired": over, "time_created_ns": 1 if over else 2}


def recorded_collectives(monkeypatch: pytest.MonkeyPatch, gloo: list[Any], nccl: list[Any]) -> list[Any]:
    for name, entries in (("_dump_fr_trace", gloo), ("_dump_nccl_trace", nccl)):
        pickled = pickle.dumps({"entries": entries})
        monkeypatch.setattr(c10d, name, lambda *_, pickled=pickled: pickled, raising=False)
    return list(flight_recorder.recent_collectives(with_lines=False))


@pytest.mark.parametrize(
    ("file", "line", "is_waiting"),
    [
        ("/x/torch/distributed/distributed_c10d.py", "work.wait()", True),
        ("/x/torch/distributed/distributed_c10d.py", "return pg.broadcast(tensors, opts)", True),
        ("/x/phalanx/parallel/pipeline/p2p.py", "work.wait()", True),
        ("/x/torch/distributed/checkpoint/hf_storage.py", "tensor = file.get_slice(name)", False),
        ("/x/phalanx/data/loader.py", "item = ready.get()", False),
    ],
)
def test_is_waiting_is_true_only_for_communication_frames(file: str, line: str, is_waiting: bool) -> None:
    own = FrameSummary("/x/phalanx/train/trainer.py", 1, "resume", line="load_state(checkpoint)")
    assert watchdog._is_waiting(StackSummary.from_list([own, FrameSummary(file, 2, "f", line=line)])) is is_waiting
