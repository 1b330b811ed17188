"""The page of `phalanx watch --web`: what a run's report says, of the run as it is now."""

from __future__ import annotations

import json
from pathlib import Path

from phalanx.cli.common.http_server import Answer, make_http_server
from phalanx.report.compare_runs import report_data
from phalanx.report.facts import report_facts
from phalanx.report.html.page import main, page
from phalanx.report.profiled_steps import Facts
from phalanx.report.run_data import read_run

HERE = "127.0.0.1"


def serve(directory: Path, port: int, every_seconds: float) -> None:
    """Serve the page to this machine, and say where, until interrupted.

    Raises UserError if the port is taken.
    """

    def answer(path: str, host: str) -> Answer:
        # A page of another site could give its own name this address, and so read what is served.
        if host not in (HERE, "localhost"):
            return 403, "text/plain", f"open http://{HERE}"
        match path:
            case "/":
                return 200, "text/html", page(_now(directory), every_seconds)
            case "/main.html":
                return 200, "text/html", main(_now(directory))
            case "/facts.json":
                return 200, "application/json", json.dumps(_now(directory))
        return 404, "text/plain", "there is nothing of this name"

    with make_http_server("--port", HERE, port, answer) as found:
        print(f"http://{HERE}:{found.server_port}/  (Ctrl-C ends it)", flush=True)
        found.serve_forever()


def _now(directory: Path) -> Facts:
    return report_data([report_facts(read_run(directory))])
