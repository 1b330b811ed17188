"""Serving texts over HTTP, to those who watch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from phalanx.spec.errors import UserError

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
                code, kind, text = 500, "text/plain", str(error)
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
        raise UserError(option, port, problem, "name another, or 0 for any") from None
