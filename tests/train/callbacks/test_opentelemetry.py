"""An OTLP collector receives the numbers of metrics.jsonl, read back by OpenTelemetry's own messages."""

from __future__ import annotations

import gzip
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.runs.metrics import read_metrics
from phalanx.spec.errors import UserError
from phalanx.train import worker
from phalanx.train.callbacks.opentelemetry import OpenTelemetry, OpenTelemetryLogger
from phalanx.train.create_run import create_run
from phalanx.train.loggers import numbers
from phalanx.train.rank_options import RankOptions
from tests.helpers.small_runs import small_run


def test_missing_exporter_names_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other packages install the rest of OpenTelemetry."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(UserError, match=r"requires opentelemetry.*\n.*\.\[opentelemetry\]"):
        OpenTelemetry()


def test_opentelemetry_gauges_have_last_number_of_each_name() -> None:
    """The provider is a dictionary of gauges, so that the calls are tested where OpenTelemetry is not installed."""
    gauges: dict[str, list[float]] = {}

    def create_gauge(name: str) -> Any:
        assert name not in gauges
        return SimpleNamespace(set=gauges.setdefault(name, []).append)

    ended: list[bool] = []
    meter = SimpleNamespace(create_gauge=create_gauge)
    logger = OpenTelemetryLogger(SimpleNamespace(get_meter=lambda name: meter, shutdown=lambda: ended.append(True)))
    logger.write({"step": 1, "loss": 2.5, "time": 7.0})
    logger.write({"step": 2, "loss": 2.0, "grad_norm": float("inf")})
    assert gauges == {"phalanx.step": [1, 2], "phalanx.loss": [2.5, 2.0]}
    assert not ended
    logger.close()
    assert ended


def test_collector_receives_last_numbers_of_metrics_file(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="not installed: pip install '.[opentelemetry]'")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    requests: list[ExportMetricsServiceRequest] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            is_compressed = self.headers.get("Content-Encoding") == "gzip"
            requests.append(ExportMetricsServiceRequest.FromString(gzip.decompress(body) if is_compressed else body))
            self.send_response(200)
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}/v1/metrics"
    callback = {"class": "phalanx.train.callbacks.opentelemetry:OpenTelemetry", "endpoint": endpoint}
    changes = {"training.steps": 3, "evaluation": {"tokens": 64}, "callbacks": {"otel": callback}}
    directory = create_run(small_run(text, tmp_path, changes), 1, resume=False)
    assert worker.run_rank(directory, RankOptions(resume=True, trust=True)) == 0
    server.shutdown()
    (resource,) = requests[-1].resource_metrics
    attributes = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert (attributes["service.name"], attributes["phalanx.run"]) == ("phalanx", "parity")
    points = {
        metric.name.removeprefix("phalanx."): metric.gauge.data_points[-1]
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    received = {name: point.as_double or point.as_int for name, point in points.items()}
    expected: dict[str, float] = {}
    for record in read_metrics(directory):
        expected |= {"step": record["step"], **numbers(record)}
    assert received == {name: pytest.approx(value) for name, value in expected.items()}
