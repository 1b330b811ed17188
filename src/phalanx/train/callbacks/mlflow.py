"""Callback that writes the records of a run to MLflow."""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from phalanx.runs.metrics import MetricsRecord
from phalanx.spec.extras import missing_package
from phalanx.train.callbacks.callback import Callback
from phalanx.train.callbacks.records import is_recorded, numbers

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer


class MLflow(Callback):
    """Writes on rank 0 what metrics.jsonl has; a run that resumes from a checkpoint continues its MLflow run."""

    def __init__(self, experiment: str = "phalanx", tracking_uri: str | None = None) -> None:
        """Choose the destination.

        Args:
            experiment: Name of the experiment; it is created if it does not exist.
            tracking_uri: Server or directory; None: MLFLOW_TRACKING_URI, or MLflow's default.
        """
        if find_spec("mlflow") is None:
            raise missing_package("callbacks", "MLflow", "mlflow")
        self.experiment = experiment
        self.tracking_uri = tracking_uri
        self.run_id: str | None = None
        self._client: Any = None

    def on_train_start(self, trainer: Trainer) -> None:
        """Create the MLflow run, or open it again."""
        if not trainer.is_main:
            return
        from mlflow import MlflowClient

        self._client = MlflowClient(self.tracking_uri)
        if self.run_id is None:
            known = self._client.get_experiment_by_name(self.experiment)
            experiment_id = known.experiment_id if known else self._client.create_experiment(self.experiment)
            self.run_id = self._client.create_run(experiment_id, run_name=trainer.run.name).info.run_id
            for name, value in _flatten(trainer.run.model_dump(mode="json", exclude_none=True)).items():
                self._client.log_param(self.run_id, name, value)
        self._client.set_terminated(self.run_id, "RUNNING")

    def on_step_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Write the record if it is due."""
        if is_recorded(trainer, record):
            self._write(record)

    def on_evaluation_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Write the record."""
        self._write(record)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Mark the MLflow run as failed."""
        self._end("FAILED")

    def on_train_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Mark the MLflow run as finished."""
        self._end("FINISHED")

    def state_dict(self) -> dict[str, Any]:
        """Return the id of the MLflow run."""
        return {"run_id": self.run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the id of the MLflow run."""
        self.run_id = state["run_id"]

    def _write(self, record: MetricsRecord) -> None:
        if self._client is not None:
            from mlflow.entities import Metric

            at = {"timestamp": int(1000 * time.time()), "step": record["step"]}
            metrics = [Metric(name, value, **at) for name, value in numbers(record).items()]
            self._client.log_batch(self.run_id, metrics=metrics)

    def _end(self, status: str) -> None:
        if self._client is not None:
            self._client.set_terminated(self.run_id, status)


def _flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted names."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
