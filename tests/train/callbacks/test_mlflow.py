"""MLflow receives the numbers of metrics.jsonl, read back by MLflow."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from phalanx.runs.metrics import read_metrics
from phalanx.train import worker
from phalanx.train.callbacks.mlflow import MLflow
from phalanx.train.create_run import create_run
from phalanx.train.loggers import numbers
from phalanx.train.rank_options import RankOptions
from tests.helpers.small_runs import small_run


def history(client: Any, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in client.get_metric_history(run_id, name)]


def test_mlflow_receives_numbers_of_metrics_file_across_restart(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install '.[mlflow]'")
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a store that needs no server
    uri = (tmp_path / "mlruns").as_uri()
    callback = {"class": "phalanx.train.callbacks.mlflow:MLflow", "experiment": "tests", "tracking_uri": uri}
    changes = {"training.steps": 4, "evaluation": {"every": 2, "tokens": 64}, "callbacks": {"mlflow": callback}}
    directory = create_run(small_run(text, tmp_path, changes), 1, resume=False)
    assert worker.run_rank(directory, RankOptions(resume=True, trust=True)) == 0
    longer = small_run(text, tmp_path, {**changes, "training.steps": 6})
    directory = create_run(longer, 1, resume=True)
    assert worker.run_rank(directory, RankOptions(resume=True, trust=True)) == 0
    client = MlflowClient(uri)
    (experiment,) = [candidate for candidate in client.search_experiments() if candidate.name == "tests"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["training.seq_len"] == str(longer.training.seq_len)
    records = [{name: value for name, value in record.items() if name != "time"} for record in read_metrics(directory)]
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3, 4, 5, 6]
    names = {name for record in records for name in numbers(record)}
    assert {"loss", "grad_norm", "tokens_per_second", "held_out_loss"} <= names
    for name in names:
        expected = [(record["step"], record[name]) for record in records if name in numbers(record)]
        assert history(client, run.info.run_id, name) == [(step, pytest.approx(value)) for step, value in expected]


class FakeClient:
    """The part of MLflow's client that the callback calls, with one store for all clients."""

    experiments: dict[str, str]
    runs: dict[str, SimpleNamespace]

    def __init__(self, tracking_uri: str | None) -> None:
        assert tracking_uri == "http://mlflow:5000"

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        return self.experiments.setdefault(name, f"id of {name}")

    def create_run(self, experiment_id: str, run_name: str) -> SimpleNamespace:
        run_id = f"run-{len(self.runs)}"
        self.runs[run_id] = SimpleNamespace(
            experiment=experiment_id, name=run_name, params={}, metrics=[], status=["RUNNING"]
        )
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def log_param(self, run_id: str, name: str, value: Any) -> None:
        self.runs[run_id].params[name] = value

    def log_batch(self, run_id: str, metrics: list[SimpleNamespace]) -> None:
        self.runs[run_id].metrics += [(metric.key, metric.value, metric.step) for metric in metrics]

    def set_terminated(self, run_id: str, status: str) -> None:
        self.runs[run_id].status.append(status)


@pytest.fixture
def fake_mlflow(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    """Replace MLflow by a store in memory, so that the calls are tested where MLflow is not installed."""
    package, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    package.__spec__ = ModuleSpec("mlflow", None)
    monkeypatch.setattr(FakeClient, "experiments", {}, raising=False)
    monkeypatch.setattr(FakeClient, "runs", {}, raising=False)
    vars(package)["MlflowClient"] = FakeClient
    vars(entities)["Metric"] = lambda key, value, timestamp, step: SimpleNamespace(key=key, value=value, step=step)
    monkeypatch.setitem(sys.modules, "mlflow", package)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return FakeClient


def test_mlflow_run_has_settings_numbers_and_state_of_two_starts(
    fake_mlflow: type[FakeClient], text: Path, tmp_path: Path
) -> None:
    run = small_run(text, tmp_path, {"training.steps": 4})
    trainer: Any = SimpleNamespace(run=run, is_main=True)
    first, second = (MLflow("tests", "http://mlflow:5000") for _ in range(2))
    first.on_train_start(trainer)
    first.on_step_end(trainer, {"step": 1, "loss": 2.5, "grad_norm": float("nan")})
    first.on_exception(trainer, RuntimeError())
    second.load_state_dict(first.state_dict())
    second.on_train_start(trainer)
    second.on_evaluation_end(trainer, {"step": 2, "held_out_loss": 2.0})
    second.on_train_end(trainer, {})
    ((_, stored),) = fake_mlflow.runs.items()
    assert (stored.experiment, stored.name) == ("id of tests", run.name)
    assert stored.params["training.steps"] == 4
    assert stored.params["layout.data_parallel"] == run.layout.data_parallel
    assert stored.metrics == [("loss", 2.5, 1), ("held_out_loss", 2.0, 2)]
    assert stored.status == ["RUNNING", "RUNNING", "FAILED", "RUNNING", "FINISHED"]


def test_mlflow_adds_second_run_to_its_experiment(fake_mlflow: type[FakeClient], text: Path, tmp_path: Path) -> None:
    trainer: Any = SimpleNamespace(run=small_run(text, tmp_path, {}))
    for _ in range(2):
        MLflow("tests", "http://mlflow:5000").open(trainer)
    assert [stored.experiment for stored in fake_mlflow.runs.values()] == ["id of tests"] * 2
