"""An HTTP proxy before a server of objects, which plants faults in requests."""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "content-length"}
S3_ERRORS = {
    "denied": (403, "AccessDenied", "Access Denied"),
    "skewed": (
        403,
        "RequestTimeTooSkewed",
        "The time of the request differs from that of the server",
    ),
    "error": (500, "InternalError", "We encountered an internal error. Please try again."),
}


@dataclass
class Fault:
    """A fault of the requests whose method and path match a pattern."""

    kind: Literal["error", "denied", "skewed", "cut", "truncated", "corrupt", "corrupt_upload", "slow"]
    """error, denied, skewed: an answer with this error of S3, and nothing happens; cut: the connection ends in the
    middle of the content; truncated: the content is half as long, and consistent; corrupt: a bit of the content is
    flipped; corrupt_upload: of the content that is sent; slow: the request reaches the server after `seconds`."""
    pattern: str = ""
    times: float = 1
    """Number of requests that have the fault."""
    seconds: float = 0.0
    hits: int = 0


@dataclass
class Proxy:
    """A running proxy."""

    url: str
    server_url: str
    """Address of the server itself, without faults."""
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    """Methods and paths of all requests."""
    bytes_read: int = 0
    """Bytes of content that clients have received."""

    def plant(self, *faults: Fault) -> None:
        """Replace the faults."""
        self.faults = list(faults)

    def take_fault(self, request: str) -> Fault | None:
        for fault in self.faults:
            if fault.hits < fault.times and re.search(fault.pattern, request):
                fault.hits += 1
                return fault
        return None


def flip_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@contextmanager
def faulty_proxy(port: int) -> Iterator[Proxy]:
    """Yield a proxy before a server on a local port."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length) if length else self.read_chunks()
            request = f"{self.command} {self.path}"
            with lock:
                proxy.requests.append(request)
                fault = proxy.take_fault(request)
            kind = fault.kind if fault else None
            if fault and kind in S3_ERRORS:
                self.answer_error(*S3_ERRORS[fault.kind])
                return
            if kind == "corrupt_upload":
                body = flip_bit(body)
            if fault and kind == "slow":
                time.sleep(fault.seconds)
                if fault not in proxy.faults:  # the test is over
                    self.close_connection = True
                    return
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_HEADERS}
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request(self.command, self.path, body, {**headers, "Content-Length": str(len(body))})
            response = connection.getresponse()
            content = response.read()
            size = response.getheader("Content-Length") if self.command == "HEAD" else None
            if kind == "truncated":
                content = content[: len(content) // 2]
            if kind == "corrupt" and content:
                content = flip_bit(content)
            if kind == "cut" and not content:
                self.close_connection = True
                self.connection.close()
                return
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in HOP_HEADERS:
                    self.send_header(name, value)
            self.send_header("Content-Length", size or str(len(content)))
            self.end_headers()
            if kind == "cut":
                self.wfile.write(content[: len(content) // 2])
                self.close_connection = True
                self.wfile.flush()
                self.connection.close()
                return
            self.wfile.write(content)
            with lock:
                proxy.bytes_read += len(content)

        def read_chunks(self) -> bytes:
            """Return the content of a request in chunks."""
            content = b""
            while self.headers.get("Transfer-Encoding", "") == "chunked":
                size = int(self.rfile.readline().split(b";")[0], 16)
                content += self.rfile.read(size)
                self.rfile.readline()
                if not size:
                    break
            return content

        def answer_error(self, status: int, code: str, message: str) -> None:
            body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", "0" if self.command == "HEAD" else str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def __getattr__(self, name: str) -> Callable[[], None]:
            if name.startswith("do_"):
                return self.forward
            raise AttributeError(name)

        def handle(self) -> None:
            with suppress(ConnectionError, ValueError):
                super().handle()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    proxy = Proxy(f"http://127.0.0.1:{server.server_port}", f"http://127.0.0.1:{port}")
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def file_server(folder: Path) -> Iterator[Proxy]:
    """Yield a proxy before a web server of the files in a folder."""

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        with faulty_proxy(server.server_port) as proxy:
            yield proxy
    finally:
        server.shutdown()
        server.server_close()
