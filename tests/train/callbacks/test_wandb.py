"""W&B receives the records of metrics.jsonl, read back from an offline run by its own messages."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from phalanx.launch import preflight
from phalanx.runs.metrics import WANDB_ID_FILE, read_metrics
from phalanx.spec.errors import UserError
from phalanx.train import worker
from phalanx.train.callbacks.wandb import Wandb, wandb_id
from phalanx.train.create_run import create_run
from phalanx.train.rank_options import RankOptions
from tests.helpers.small_runs import small_run

NEEDS_WANDB = "wandb is not installed: pip install '.[wandb]'"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def read_log(data: bytes) -> Iterator[bytes]:
    """Yield the entries of an offline run: a LevelDB log (blocks of 32 KiB) after a header of 7 bytes."""
    block_bytes, position, entry = 32768, 7, b""
    while position + 7 <= len(data):
        rest_of_block = block_bytes - position % block_bytes
        if rest_of_block < 7:
            position += rest_of_block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        entry += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield entry
            entry = b""


def logged_records(file: Path) -> list[dict[str, float]]:
    """Return the history of an offline run, decoded by the messages of W&B."""
    from wandb.proto.wandb_internal_pb2 import Record

    records = []
    for entry in read_log(file.read_bytes()):
        record = Record.FromString(entry)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            records.append({name: value for name, value in items.items() if not name.startswith("_")})
    return records


def test_wandb_receives_records_of_metrics_file_across_restart(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason=NEEDS_WANDB)
    changes = {"training.steps": 3, "evaluation": {"every": 2, "tokens": 64}, "metrics": {"wandb": "phalanx-test"}}
    directory = create_run(small_run(text, tmp_path, changes), 1, resume=False)
    assert worker.run_rank(directory, RankOptions(resume=True)) == 0
    directory = create_run(small_run(text, tmp_path, {**changes, "training.steps": 5}), 1, resume=True)
    assert worker.run_rank(directory, RankOptions(resume=True)) == 0
    files = sorted(directory.glob("wandb/offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime)
    assert {file.stem for file in files} == {f"run-{wandb_id(directory)}"}
    received: dict[tuple[int, str], object] = {}
    for record in (record for file in files for record in logged_records(file)):
        received |= {(int(record["step"]), name): value for name, value in record.items()}
    metrics = read_metrics(directory)
    expected = {(line["step"], name): value for line in metrics for name, value in line.items()}
    assert {step for step, _ in expected} == {1, 2, 3, 4, 5}
    assert (2, "held_out_loss") in expected
    numbers = {key: value for key, value in expected.items() if isinstance(value, int | float) and key[1] != "time"}
    assert {key: received[key] for key in numbers} == {key: pytest.approx(value) for key, value in numbers.items()}


def test_wandb_refuses_invalid_project(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason=NEEDS_WANDB)
    run = small_run(text, tmp_path, {"training.steps": 1, "metrics": {"wandb": "phalanx/test"}})
    directory = create_run(run, 1, resume=False)
    assert worker.run_rank(directory, RankOptions(resume=True)) == 2  # W&B allows no slash in a project


@pytest.mark.parametrize("is_namespace_package", [False, True])
def test_wandb_is_refused_when_not_installed(is_namespace_package: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "find_spec", lambda name: ModuleSpec(name, None) if is_namespace_package else None)
    with pytest.raises(UserError) as caught:
        Wandb("project")
    assert (caught.value.field, caught.value.value) == ("metrics.wandb", "project")
    assert caught.value.fix == "in a clone of Phalanx, pip install '.[wandb]'"


def test_wandb_id_depends_only_on_run_directory(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert wandb_id(tmp_path) == wandb_id(tmp_path)
    assert wandb_id(tmp_path) != wandb_id(tmp_path / "other")


def test_wandb_id_replaces_dangling_link_in_its_place(tmp_path: Path) -> None:
    (tmp_path / WANDB_ID_FILE).symlink_to(tmp_path / "nowhere")
    assert wandb_id(tmp_path)
    assert not (tmp_path / "nowhere").exists()
