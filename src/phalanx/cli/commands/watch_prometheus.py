"""The endpoint of `phalanx watch --prometheus`: the newest numbers of a run, for Prometheus to collect."""

from __future__ import annotations

from pathlib import Path
from threading import Lock

from phalanx.cli.common.http_server import Answer, make_http_server
from phalanx.report.export.prometheus import RunMetrics
from phalanx.runs.checkpoints import CHECKPOINTS_DIR, checkpoints

EVERYWHERE = "0.0.0.0"
KIND = "text/plain; version=0.0.4"
"""Of Prometheus' text format."""


def serve(directory: Path, port: int) -> None:
    """Serve the numbers to whoever reaches this machine, and say where, until interrupted.

    Raises UserError if the port is taken.
    """
    watched, one_at_a_time = RunMetrics(directory), Lock()

    def answer(path: str, host: str) -> Answer:
        if path != "/metrics":
            return 404, "text/plain", "there is /metrics only"
        with one_at_a_time:
            return 200, KIND, watched.exposition_text(checkpoints(directory / CHECKPOINTS_DIR))

    with make_http_server("--prometheus", EVERYWHERE, port, answer) as found:
        print(f"http://{EVERYWHERE}:{found.server_port}/metrics  (Ctrl-C ends it)", flush=True)
        found.serve_forever()
