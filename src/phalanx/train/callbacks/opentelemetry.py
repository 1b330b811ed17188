"""Callback that exports the metrics of a run by OpenTelemetry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx.runs.metrics import MetricsRecord
from phalanx.spec.extras import missing_package
from phalanx.train.callbacks.records import RecordWriter
from phalanx.train.loggers import Logger, numbers

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer


class OpenTelemetryLogger:
    """Gauges `phalanx.NAME` of a meter provider, with the latest value of each number of metrics.jsonl."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._meter = provider.get_meter("phalanx")
        self._gauges: dict[str, Any] = {}

    def write(self, record: MetricsRecord) -> None:
        """Set the gauges."""
        for name, value in {"step": record["step"], **numbers(record)}.items():
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(f"phalanx.{name}")
            self._gauges[name].set(value)

    def close(self, failed: bool = False) -> None:
        """Export the last values."""
        self._provider.shutdown()


class OpenTelemetry(RecordWriter):
    """Exports metrics to a collector, over OTLP/HTTP."""

    def __init__(self, endpoint: str | None = None, export_seconds: float = 10.0) -> None:
        """Choose the collector.

        Args:
            endpoint: URL of the collector, such as http://collector:4318/v1/metrics; None: the environment of
                OpenTelemetry (OTEL_EXPORTER_OTLP_ENDPOINT).
            export_seconds: Seconds between exports."""
        try:  # other packages install a part of OpenTelemetry
            import opentelemetry.exporter.otlp.proto.http  # noqa: F401
        except ImportError:
            raise missing_package("callbacks", "OpenTelemetry", "opentelemetry") from None
        self.endpoint = endpoint
        self.export_seconds = export_seconds

    def open(self, trainer: Trainer) -> Logger:
        """Start the exporter."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        exporter = OTLPMetricExporter(endpoint=self.endpoint)
        reader = PeriodicExportingMetricReader(exporter, export_interval_millis=1000 * self.export_seconds)
        resource = Resource.create({"service.name": "phalanx", "phalanx.run": trainer.run.name})
        return OpenTelemetryLogger(MeterProvider(metric_readers=[reader], resource=resource))
