"""HTTP server for pages that a command serves."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedReader, RawIOBase
from socket import socket
from threading import BoundedSemaphore
from typing import Any

from phalanx.spec.errors import UserError

LOCAL_ADDRESS = "127.0.0.1"
Answer = tuple[int, str, str]
"""Status code, content type and text."""
PATIENCE_SECONDS = 30.0
"""Seconds until a connection is closed whose request is incomplete, because each occupies a thread."""
MAX_CONNECTIONS = 64
"""Maximum number of connections at a time; further ones are closed."""
MAX_BODY_BYTES = 10_000
MAX_LENGTH_DIGITS = 9
"""Maximum number of digits of a Content-Length: `int` raises ValueError above 4,300."""
JSON_TYPE = "application/json"


def make_http_server(
    option: str,
    host: str,
    port: int,
    get: Callable[[str, str], Answer],
    post: Callable[[str, str, bytes], Answer] | None = None,
) -> ThreadingHTTPServer:
    """Return a server that listens on a port of this machine; 0 selects a free one.

    `get` responds to GET: its arguments are the path and the host name of the request. `post` responds to POST, and
    also gets a JSON body. A body of another content type is rejected, because pages of other sites can send those
    without permission. Raises UserError if the port, which `option` names, is in use.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = PATIENCE_SECONDS

        def setup(self) -> None:
            super().setup()
            self.rfile = BufferedReader(_TimedReader(self.connection))

        def do_GET(self) -> None:
            self._send_answer(get, self.path.partition("?")[0], self._requested_host())

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            if post is None:
                self.send_error(405)
            elif self.headers.get_content_type() != JSON_TYPE:
                self.send_error(415)
            elif not length.isdecimal() or len(length) > MAX_LENGTH_DIGITS or int(length) > MAX_BODY_BYTES:
                self.send_error(413)
            else:
                self._send_answer(post, self.path, self._requested_host(), self.rfile.read(int(length)))

        def _requested_host(self) -> str:
            return self.headers.get("Host", "").partition(":")[0]

        def _send_answer(self, answer: Callable[..., Answer], *arguments: object) -> None:
            try:
                code, content_type, text = answer(*arguments)
            except UserError as error:
                code = 500
                content_type = "text/plain"
                text = str(error)
            except Exception:
                traceback.print_exc()
                code = 500
                content_type = "text/plain"
                text = "the server failed; its terminal shows the error"
            self.connection.settimeout(PATIENCE_SECONDS)
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", f"{content_type}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """No-op: requests are not logged."""

    class Server(ThreadingHTTPServer):
        free_connections = BoundedSemaphore(MAX_CONNECTIONS)

        def process_request(self, request: Any, client_address: Any) -> None:
            if not self.free_connections.acquire(blocking=False):
                self.shutdown_request(request)
                return
            try:
                super().process_request(request, client_address)
            except Exception:
                # No thread was started, which would have released it. Ctrl-C may come after its start.
                self.free_connections.release()
                raise

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                super().process_request_thread(request, client_address)
            finally:
                self.free_connections.release()

        def handle_error(self, request: Any, client_address: Any) -> None:
            # `_send_answer` reports those of the answer; what is left are connections closed by the page or by Ctrl-C.
            if not isinstance(sys.exception(), OSError):
                super().handle_error(request, client_address)

    try:
        return Server((host, port), Handler)
    except OSError as error:
        problem = f"cannot be served: {error.strerror}"
        raise UserError(option, port, problem, fix="choose another port, or 0 for any free port") from None


class _TimedReader(RawIOBase):
    """The bytes of a connection that arrive within `PATIENCE_SECONDS` after its start.

    The socket's own timeout restarts with each byte."""

    def __init__(self, connection: socket) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + PATIENCE_SECONDS

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Receive some bytes. Raises TimeoutError after the deadline."""
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        self._connection.settimeout(seconds)
        return self._connection.recv_into(buffer)


def refuse_other_hosts(host: str) -> Answer | None:
    """Return a refusal unless a request names this machine as its host, else None.

    A page of another site could map its own name to this address, and so read the served data.
    """
    return None if host in (LOCAL_ADDRESS, "localhost") else (403, "text/plain", f"open http://{LOCAL_ADDRESS}")


def serve_until_interrupted(server: ThreadingHTTPServer, path: str = "") -> None:
    """Print the address of a page, and serve it until Ctrl-C."""
    host, port = server.server_address[:2]
    print(f"http://{host!s}:{port}/{path}  (Ctrl-C to stop)", flush=True)
    server.serve_forever()
