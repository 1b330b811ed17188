"""HTTP servers of `phalanx watch`: the page of --web, and the metrics of --prometheus."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from phalanx.report.compare_runs import report_data
from phalanx.report.export.prometheus import RunMetrics
from phalanx.report.facts import report_facts
from phalanx.report.html.page import main, page
from phalanx.report.profiled_steps import Facts
from phalanx.report.run_data import read_run
from phalanx.runs.checkpoints import CHECKPOINTS_DIR, checkpoints
from phalanx.spec.errors import UserError

LOCAL_ADDRESS = "127.0.0.1"
ANY_ADDRESS = "0.0.0.0"
METRICS_TYPE = "text/plain; version=0.0.4"
"""Content type of Prometheus' text format."""
Answer = tuple[int, str, str]
"""Status code, kind and text."""
PATIENCE_SECONDS = 30.0
"""For one who is connected: each holds a thread."""


def make_http_server(option: str, host: str, port: int, answer: Callable[[str, str], Answer]) -> ThreadingHTTPServer:
    """One that answers GET; `answer` is given the path that is asked for, and the name under which the asker knows this
    machine.

    Raises UserError if the port is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = PATIENCE_SECONDS

        def do_GET(self) -> None:
            try:
                code, kind, text = answer(self.path.partition("?")[0], self.headers.get("Host", "").partition(":")[0])
            except UserError as error:
                code = 500
                kind = "text/plain"
                text = str(error)
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing of requests."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exception(), ConnectionError):  # a page that was closed is no error
                super().handle_error(request, client_address)

    try:
        return Server((host, port), Handler)
    except OSError as error:
        problem = f"cannot be served: {error.strerror}"
        raise UserError(option, port, problem, fix="name another, or 0 for any") from None


def serve_page(directory: Path, port: int, every_seconds: float) -> None:
    """Serve the page to this machine, and say where, until interrupted.

    Raises UserError if the port is taken.
    """

    def answer(path: str, host: str) -> Answer:
        # A page of another site could give its own name this address, and so read what is served.
        if host not in (LOCAL_ADDRESS, "localhost"):
            return 403, "text/plain", f"open http://{LOCAL_ADDRESS}"
        match path:
            case "/":
                return 200, "text/html", page(_current_facts(directory), every_seconds)
            case "/main.html":
                return 200, "text/html", main(_current_facts(directory))
            case "/facts.json":
                return 200, "application/json", json.dumps(_current_facts(directory))
        return 404, "text/plain", "there is nothing of this name"

    with make_http_server("--port", LOCAL_ADDRESS, port, answer=answer) as server:
        print(f"http://{LOCAL_ADDRESS}:{server.server_port}/  (Ctrl-C ends it)", flush=True)
        server.serve_forever()


def _current_facts(directory: Path) -> Facts:
    return report_data([report_facts(read_run(directory))])


def serve_metrics(directory: Path, port: int) -> None:
    """Serve the numbers to whoever reaches this machine, and say where, until interrupted.

    Raises UserError if the port is taken.
    """
    metrics = RunMetrics(directory)
    lock = Lock()

    def answer(path: str, host: str) -> Answer:
        if path != "/metrics":
            return 404, "text/plain", "there is /metrics only"
        with lock:
            return 200, METRICS_TYPE, metrics.exposition_text(checkpoints(directory / CHECKPOINTS_DIR))

    with make_http_server("--prometheus", ANY_ADDRESS, port, answer=answer) as server:
        print(f"http://{ANY_ADDRESS}:{server.server_port}/metrics  (Ctrl-C ends it)", flush=True)
        server.serve_forever()
