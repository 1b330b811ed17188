"""MLflow receives the numbers of metrics.jsonl, read back by MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.runs.metrics import read_metrics
from phalanx.train import worker
from phalanx.train.create_run import create_run
from phalanx.train.loggers import numbers
from phalanx.train.rank_options import RankOptions
from tests.helpers.small_runs import small_run

pytest.importorskip("mlflow", reason="mlflow is not installed: pip install '.[mlflow]'")


def history(client: Any, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in client.get_metric_history(run_id, name)]


def test_mlflow_receives_numbers_of_metrics_file_across_restart(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
