"""W&B receives the records of metrics.jsonl, read back from an offline run by its own messages."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from phalanx.launch import preflight
from phalanx.runs.metrics import WANDB_ID_FILE, read_metrics
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table
from phalanx.train import worker
from phalanx.train.callbacks.standard import build_record_writers
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


def read_messages(file: Path) -> Iterator[Any]:
    """Yield the messages of an offline run."""
    from wandb.proto.wandb_internal_pb2 import Record

    yield from map(Record.FromString, read_log(file.read_bytes()))


def logged_records(file: Path) -> list[dict[str, float]]:
    """Return the history of an offline run, decoded by the messages of W&B."""
    records = []
    for record in read_messages(file):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            records.append({name: value for name, value in items.items() if not name.startswith("_")})
    return records


def test_wandb_receives_records_of_metrics_file_across_restart(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason=NEEDS_WANDB)
    labels = {"wandb_entity": "team", "wandb_group": "sweep", "wandb_tags": ["baseline", "cpu"]}
    metrics_table = {"wandb": "phalanx-test", **labels}
    changes = {"training.steps": 3, "evaluation": {"every": 2, "tokens": 64}, "metrics": metrics_table}
    directory = create_run(small_run(text, tmp_path, changes), 1, resume=False)
    assert worker.run_rank(directory, RankOptions(resume=True)) == 0
    directory = create_run(small_run(text, tmp_path, {**changes, "training.steps": 5}), 1, resume=True)
    assert worker.run_rank(directory, RankOptions(resume=True)) == 0
    files = sorted(directory.glob("wandb/offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime)
    assert {file.stem for file in files} == {f"run-{wandb_id(directory)}"}
    for file in files:
        (opened, *_) = (message.run for message in read_messages(file) if message.WhichOneof("record_type") == "run")
        assert (opened.project, opened.entity, opened.run_group) == ("phalanx-test", "team", "sweep")
        assert list(opened.tags) == ["baseline", "cpu"]
    received: dict[tuple[int, str], object] = {}
    for record in (record for file in files for record in logged_records(file)):
        received |= {(int(record["step"]), name): value for name, value in record.items()}
    metrics = read_metrics(directory)
    expected = {(line["step"], name): value for line in metrics for name, value in line.items()}
    assert {step for step, _ in expected} == {1, 2, 3, 4, 5}
    assert (2, "held_out_loss") in expected
    numbers = {key: value for key, value in expected.items() if isinstance(value, int | float) and key[1] != "time"}
    assert {key: received[key] for key in numbers} == {key: pytest.approx(value) for key, value in numbers.items()}


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace W&B by a list of the runs that were opened, so that the calls are tested where W&B is not installed."""
    opened: list[dict[str, Any]] = []

    def init(**options: Any) -> SimpleNamespace:
        if "/" in options["project"]:
            raise module.Error("no slash in a project")
        opened.append({**options, "records": [], "exit_code": None})
        return SimpleNamespace(
            log=lambda record, step: opened[-1]["records"].append((step, record["loss"])),
            finish=lambda exit_code: opened[-1].update(exit_code=exit_code),
        )

    module: Any = ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None, origin="wandb/__init__.py")
    module.init, module.Error = init, type("Error", (Exception,), {})
    monkeypatch.setitem(sys.modules, "wandb", module)
    return opened


def test_wandb_run_has_settings_records_and_end_of_two_starts(
    fake_wandb: list[dict[str, Any]], text: Path, tmp_path: Path
) -> None:
    run = small_run(text, tmp_path, {"training.steps": 4})
    trainer: Any = SimpleNamespace(run=run, is_main=True, directory=tmp_path)
    callback = Wandb("project")
    callback.on_train_start(trainer)
    callback.on_step_end(trainer, {"step": 1, "loss": 2.5})
    callback.on_exception(trainer, RuntimeError())
    callback.on_train_start(trainer)
    callback.on_step_end(trainer, {"step": 2, "loss": 2.0})
    callback.on_train_end(trainer, {})
    assert [opened["records"] for opened in fake_wandb] == [[(1, 2.5)], [(2, 2.0)]]
    assert [opened["exit_code"] for opened in fake_wandb] == [1, 0]
    for opened in fake_wandb:
        assert (opened["project"], opened["name"], opened["id"]) == ("project", run.name, wandb_id(tmp_path))
        assert (opened["resume"], opened["config"]["training"]["steps"]) == ("allow", 4)


def test_wandb_names_project_that_it_cannot_open(fake_wandb: list[dict[str, Any]], text: Path, tmp_path: Path) -> None:
    trainer: Any = SimpleNamespace(run=small_run(text, tmp_path, {}), directory=tmp_path)
    with pytest.raises(UserError, match=r"metrics\.wandb = 'a/b' cannot be opened: no slash in a project"):
        Wandb("a/b").open(trainer)
    assert not fake_wandb


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


@pytest.mark.parametrize(
    ("field", "value"), [("wandb_entity", "team"), ("wandb_group", "sweep"), ("wandb_tags", ["baseline"])]
)
def test_wandb_label_is_refused_without_project(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^metrics\.{field} = .* has no effect without a project"):
        run_from_table({"model": {"preset": "tiny"}, "metrics": {field: value}})


class RecordedInit:
    """Stand-in for the package wandb, which records the arguments of `init`."""

    Error = RuntimeError

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def init(self, **options: Any) -> None:
        self.options = options


@pytest.mark.parametrize(
    ("metrics", "labels"),
    [
        ({}, {"entity": None, "group": None, "tags": None}),
        (
            {"wandb_entity": "team", "wandb_group": "sweep", "wandb_tags": ["baseline"]},
            {"entity": "team", "group": "sweep", "tags": ["baseline"]},
        ),
    ],
)
def test_wandb_receives_labels_of_run_file(
    metrics: dict[str, Any], labels: dict[str, Any], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = RecordedInit()
    monkeypatch.setitem(sys.modules, "wandb", recorded)
    monkeypatch.setattr(preflight, "find_spec", lambda name: ModuleSpec(name, None, origin="recorded"))
    run = small_run(text, tmp_path, {"metrics": {"wandb": "project", **metrics}})
    writer = build_record_writers(run)["wandb"]
    assert isinstance(writer, Wandb)
    writer.open(SimpleNamespace(directory=tmp_path, run=run))
    assert {name: recorded.options[name] for name in labels} == labels
    assert recorded.options["project"] == "project"


def test_wandb_id_depends_only_on_run_directory(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert wandb_id(tmp_path) == wandb_id(tmp_path)
    assert wandb_id(tmp_path) != wandb_id(tmp_path / "other")


def test_wandb_id_replaces_dangling_link_in_its_place(tmp_path: Path) -> None:
    (tmp_path / WANDB_ID_FILE).symlink_to(tmp_path / "nowhere")
    assert wandb_id(tmp_path)
    assert not (tmp_path / "nowhere").exists()
