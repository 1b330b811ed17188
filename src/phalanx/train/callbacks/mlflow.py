"""Callback that writes the records of a run to MLflow."""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from phalanx.runs.metrics import MetricsRecord
from phalanx.spec.extras import missing_package
from phalanx.train.callbacks.records import RecordWriter
from phalanx.train.loggers import Logger, numbers

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer


class MLflowLogger:
    """A run of MLflow, which receives the finite numbers of metrics.jsonl."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client = client
        self._run_id = run_id
        client.set_terminated(run_id, "RUNNING")

    def write(self, record: MetricsRecord) -> None:
        """Send a record."""
        from mlflow.entities import Metric

        at = {"timestamp": int(1000 * time.time()), "step": record["step"]}
        metrics = [Metric(name, value, **at) for name, value in numbers(record).items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, failed: bool = False) -> None:
        """Mark the run of MLflow as failed or finished."""
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


class MLflow(RecordWriter):
    """Writes to an experiment of MLflow. A run that resumes from a checkpoint continues its run of MLflow."""

    def __init__(self, experiment: str = "phalanx", tracking_uri: str | None = None) -> None:
        """Choose the destination.

        Args:
            experiment: Name of the experiment; it is created if it does not exist.
            tracking_uri: Server or directory; None: MLFLOW_TRACKING_URI, or MLflow's default."""
        if find_spec("mlflow") is None:
            raise missing_package("callbacks", "MLflow", "mlflow")
        self.experiment = experiment
        self.tracking_uri = tracking_uri
        self.run_id: str | None = None

    def open(self, trainer: Trainer) -> Logger:
        """Create the run of MLflow, or open it again."""
        from mlflow import MlflowClient

        client = MlflowClient(self.tracking_uri)
        if self.run_id is None:
            experiment = client.get_experiment_by_name(self.experiment)
            experiment_id = experiment.experiment_id if experiment else client.create_experiment(self.experiment)
            run_id: str = client.create_run(experiment_id, run_name=trainer.run.name).info.run_id
            for name, value in _flatten_table(trainer.run.model_dump(mode="json", exclude_none=True)).items():
                client.log_param(run_id, name, value)
            self.run_id = run_id
        return MLflowLogger(client, self.run_id)

    def state_dict(self) -> dict[str, Any]:
        """Return the id of the run of MLflow."""
        return {"run_id": self.run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the id of the run of MLflow."""
        self.run_id = state["run_id"]


def _flatten_table(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted names."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat |= _flatten_table(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
