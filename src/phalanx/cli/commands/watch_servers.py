"""HTTP servers of `phalanx watch`: the page of --web, and the metrics of --prometheus."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Lock

from phalanx.cli.common.http_server import (
    LOCAL_ADDRESS,
    Answer,
    make_http_server,
    refuse_other_hosts,
    serve_until_interrupted,
)
from phalanx.report.compare_runs import report_data
from phalanx.report.export.prometheus import RunMetrics
from phalanx.report.facts import report_facts
from phalanx.report.html.page import main, page
from phalanx.report.profiled_steps import Facts
from phalanx.report.run_data import read_run
from phalanx.runs.checkpoints import CHECKPOINTS_DIR, checkpoints

ANY_ADDRESS = "0.0.0.0"
METRICS_TYPE = "text/plain; version=0.0.4"
"""Content type of Prometheus' text format."""


def serve_page(directory: Path, port: int, every_seconds: float) -> None:
    """Serve the page to this machine, and print its address, until interrupted.

    The page requests its content again every `every_seconds`. Raises UserError if the port is in use.
    """

    def answer(path: str, host: str) -> Answer:
        if refusal := refuse_other_hosts(host):
            return refusal
        match path:
            case "/":
                return 200, "text/html", page(_read_facts(directory), every_seconds)
            case "/main.html":
                return 200, "text/html", main(_read_facts(directory))
            case "/facts.json":
                return 200, "application/json", json.dumps(_read_facts(directory))
        return 404, "text/plain", "not found"

    with make_http_server("--port", LOCAL_ADDRESS, port, get=answer) as server:
        serve_until_interrupted(server)


def _read_facts(directory: Path) -> Facts:
    return report_data([report_facts(read_run(directory))])


def serve_metrics(directory: Path, port: int) -> None:
    """Serve the metrics to any machine that can connect, and print the address, until interrupted.

    Raises UserError if the port is in use.
    """
    metrics = RunMetrics(directory)
    lock = Lock()

    def answer(path: str, host: str) -> Answer:
        if path != "/metrics":
            return 404, "text/plain", "not found: only /metrics is served"
        with lock:
            return 200, METRICS_TYPE, metrics.exposition_text(checkpoints(directory / CHECKPOINTS_DIR))

    with make_http_server("--prometheus", ANY_ADDRESS, port, get=answer) as server:
        serve_until_interrupted(server, "metrics")
