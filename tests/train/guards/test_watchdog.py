"""A rank's word: that it stays where the rank failed, goes where it did not, and tells what belongs together."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from traceback import FrameSummary, StackSummary
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
    """Stays as it is."""
    monkeypatch.setattr(watchdog, "_install_abort_handler", lambda file: None)
    monkeypatch.setattr(watchdog.faulthandler, "disable", lambda: None)


def test_watchdog_preserves_failure_dump_when_collectives_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though just then the thread sees something move: a collective ends when it gives up."""
    looking = threading.Event()

    def moved() -> bytes:
        if not dump_file(tmp_path, 0).exists():
            return b""
        looking.set()
        wait_until(lambda: "error" in read_dumps(tmp_path)[0], "the failure is written down")
        return b"moved"

    monkeypatch.setattr(watchdog, "recorder_fingerprint", moved)
    under_watch = Watchdog(tmp_path, timeout_seconds=0.1)

    def fail() -> None:
        assert looking.wait(WAIT_SECONDS), "it hangs"
        raise RuntimeError("gloo: Timed out waiting for others")

    with pytest.raises(RuntimeError), under_watch:
        fail()
    under_watch._thread.join()
    assert "Timed out" in read_dumps(tmp_path)[0]["error"]


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
    """On a GPU the group of all ranks has both: the first of one is not compared with the first of the other."""
    sizes = ParallelDims(dp_shard=2)
    gloo, nccl = recorder_entry("gloo:broadcast", over=True), recorder_entry("nccl:all_reduce", over=False)
    here, late = recorded_collectives(monkeypatch, [gloo], [nccl]), recorded_collectives(monkeypatch, [gloo], [])
    dumps = {0: make_dump(0, sizes, here, WAITING), 1: make_dump(1, sizes, late, BUSY)}
    for told in dumps.values():
        told["groups"] = {call["group"]: [0, 1] for call in here}
    found = diagnose_hang(dumps, {}, sizes).verdict
    assert (found.kind, found.ranks) == ("absent", (1,))
    assert "rank 0 (dp=0) waited in all_reduce of [4] Float, number 1 of all ranks" in found.summary


def recorder_entry(name: str, over: bool) -> dict[str, Any]:
    """The first collective of all ranks, as PyTorch's recorders tell of it."""
    found = {"process_group": ("0", "default_pg"), "collective_seq_id": 1, "profiling_name": name, "is_p2p": False}
    found |= {"input_sizes": [[4]], "output_sizes": [[4]], "input_dtypes": ["Float"], "state": "scheduled"}
    return {**found, "retired": over, "time_created_ns": 1 if over else 2}


def recorded_collectives(monkeypatch: pytest.MonkeyPatch, gloo: list[Any], nccl: list[Any]) -> list[Any]:
    for name, entries in (("_dump_fr_trace", gloo), ("_dump_nccl_trace", nccl)):
        told = pickle.dumps({"entries": entries})
        monkeypatch.setattr(c10d, name, lambda *_, told=told: told, raising=False)
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
