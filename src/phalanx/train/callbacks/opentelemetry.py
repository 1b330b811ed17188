"""Callback that exports the metrics of a run by OpenTelemetry."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from phalanx.runs.metrics import MetricsRecord
from phalanx.spec.extras import missing_package
from phalanx.train.callbacks.callback import Callback
from phalanx.train.callbacks.records import is_recorded, numbers

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer


class OpenTelemetry(Callback):
    """Exports the latest value of each number of metrics.jsonl on rank 0: gauge `phalanx.NAME`, over OTLP/HTTP."""

    def __init__(self, endpoint: str | None = None, export_seconds: float = 10.0) -> None:
        """Choose the collector.

        Args:
            endpoint: URL of the collector, such as http://collector:4318/v1/metrics; None: the environment of
                OpenTelemetry (OTEL_EXPORTER_OTLP_ENDPOINT).
            export_seconds: Seconds between exports.
        """
        if find_spec("opentelemetry") is None:
            raise missing_package("callbacks", "OpenTelemetry", "opentelemetry")
        self.endpoint = endpoint
        self.export_seconds = export_seconds
        self._provider: Any = None
        self._gauges: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer) -> None:
        """Start the exporter."""
        if not trainer.is_main:
            return
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        exporter = OTLPMetricExporter(endpoint=self.endpoint)
        reader = PeriodicExportingMetricReader(exporter, export_interval_millis=1000 * self.export_seconds)
        resource = Resource.create({"service.name": "phalanx", "phalanx.run": trainer.run.name})
        self._provider = MeterProvider(metric_readers=[reader], resource=resource)
        self._meter = self._provider.get_meter("phalanx")

    def on_step_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Set the gauges if the record is due."""
        if is_recorded(trainer, record):
            self._set(record)

    def on_evaluation_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Set the gauges of the evaluation."""
        self._set(record)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Export the last values."""
        self._shut_down()

    def on_train_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Export the last values."""
        self._shut_down()

    def _set(self, record: MetricsRecord) -> None:
        if self._provider is None:
            return
        for name, value in {"step": record["step"], **numbers(record)}.items():
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(f"phalanx.{name}")
            self._gauges[name].set(value)

    def _shut_down(self) -> None:
        if self._provider is not None:
            self._provider.shutdown()
            self._provider = None
