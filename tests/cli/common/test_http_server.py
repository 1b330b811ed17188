"""The server of local pages: the connections that it closes and the requests that it rejects."""

from __future__ import annotations

import select
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Event, Thread

import pytest

from phalanx.cli.common import http_server
from phalanx.cli.common.http_server import JSON_TYPE, MAX_BODY_BYTES, make_http_server
from phalanx.testing.processes import wait_until
from tests.helpers.trained_runs import TIMEOUT_SECONDS


@contextmanager
def running(post=None) -> Iterator[tuple[str, int]]:
    with make_http_server("--port", "127.0.0.1", 0, lambda path, host: (200, "text/plain", path), post) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address
        finally:
            server.shutdown()
            thread.join()


def test_http_server_closes_idle_connection_after_timeout(monkeypatch):
    monkeypatch.setattr(http_server, "PATIENCE_SECONDS", 0.1)
    with running() as address, socket.create_connection(address, timeout=TIMEOUT_SECONDS) as silent:
        assert silent.recv(1) == b""


def test_http_server_closes_connection_of_slow_client_after_timeout(monkeypatch):
    """Each byte restarts the timeout of a socket, so that this timeout alone lets a client occupy a thread forever."""
    monkeypatch.setattr(http_server, "PATIENCE_SECONDS", 0.3)
    with running() as address, socket.create_connection(address, timeout=TIMEOUT_SECONDS) as slow:
        wait_until(partial(is_closed_after, slow, b"G"), "the connection is closed", TIMEOUT_SECONDS)


def is_closed_after(connection: socket.socket, part: bytes) -> bool:
    """Send a part of a request, and return whether the server has closed the connection."""
    try:
        connection.sendall(part)
        return bool(select.select([connection], [], [], 0.02)[0]) and connection.recv(1) == b""
    except ConnectionError:
        return True


def test_http_server_closes_connections_above_the_maximum(monkeypatch):
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 2)
    with running() as address, ExitStack() as open_connections:
        silent = [
            open_connections.enter_context(socket.create_connection(address, timeout=TIMEOUT_SECONDS)) for _ in range(3)
        ]
        assert silent[2].recv(1) == b""
        silent[0].close()
        url = "http://{}:{}/".format(*address)
        wait_until(lambda: is_answered(url), "a closed connection makes room for another")


def test_http_server_answers_after_threads_could_not_start(monkeypatch, capfd):
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 1)
    start = http_server.ThreadingHTTPServer.process_request

    def fail(*_):
        raise RuntimeError("can't start new thread")

    with running() as address:
        monkeypatch.setattr(http_server.ThreadingHTTPServer, "process_request", fail)
        with socket.create_connection(address, timeout=TIMEOUT_SECONDS) as refused:
            assert refused.recv(1) == b""
        monkeypatch.setattr(http_server.ThreadingHTTPServer, "process_request", start)
        assert is_answered("http://{}:{}/".format(*address))
    assert "can't start new thread" in capfd.readouterr().err


def test_http_server_is_silent_about_requests_that_ctrl_c_closes(monkeypatch, capfd):
    """Ctrl-C between a request's thread and the next request closes that request under its thread."""
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 1)
    start, closed = http_server.ThreadingHTTPServer.process_request, Event()

    def start_then_interrupt(*arguments):
        start(*arguments)
        raise KeyboardInterrupt

    def answer(path, host):
        assert closed.wait(TIMEOUT_SECONDS)
        return 200, "text/plain", path

    monkeypatch.setattr(http_server.ThreadingHTTPServer, "process_request", start_then_interrupt)
    with make_http_server("--port", "127.0.0.1", 0, answer) as server:
        with socket.create_connection(server.server_address, timeout=TIMEOUT_SECONDS) as client:
            client.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with pytest.raises(KeyboardInterrupt):
                server.handle_request()
        closed.set()
        assert server.free_connections.acquire(timeout=TIMEOUT_SECONDS)
    assert capfd.readouterr().err == ""


def is_answered(url: str) -> bool:
    try:
        return urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS).status == 200
    except (ConnectionError, urllib.error.URLError):
        return False


def send(address: tuple[str, int], request: bytes) -> bytes:
    """Send a request as it is, without more data, and return the response."""
    with socket.create_connection(address, timeout=TIMEOUT_SECONDS) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        response = b""
        while part := connection.recv(2**16):
            response += part
    return response


JSON_HEAD = b"POST / HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: "


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"PUT / HTTP/1.1\r\n\r\n", b" 501 "),
        (b"BREW / HTTP/1.1\r\n\r\n", b" 501 "),
        (b"GET / HTTP/9.9\r\n\r\n", b" 505"),
        (b"\x00\xff" * 100 + b"\r\n\r\n", b" 400"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b" 414 "),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", b" 431 "),
        (b"POST / HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: -1\r\n\r\n{}", b" 413 "),
        (JSON_HEAD + b"9" * 5_000 + b"\r\n\r\n{}", b" 413 "),
        (JSON_HEAD + b"0" * 5_000 + b"2\r\n\r\n{}", b" 413 "),
        (b"POST / HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n{}", b" 413 "),
        (b"POST / HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{}", b" 200 "),
    ],
)
def test_http_server_answers_malformed_requests(request_bytes, status, capfd):
    with running(lambda path, host, body: (200, JSON_TYPE, body.decode())) as address:
        assert status in send(address, request_bytes)[:600]
        assert b" 200 " in send(address, b"GET / HTTP/1.1\r\n\r\n")
    assert capfd.readouterr().err == ""


def test_http_server_answers_after_an_exception(capfd):
    def fail(path, host, body):
        raise RecursionError("too deep")

    with running(fail) as address:
        head = b"POST / HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
        assert b" 500 " in send(address, head)
        assert b" 200 " in send(address, b"GET / HTTP/1.1\r\n\r\n")
    assert "RecursionError: too deep" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("body", "kind", "code"),
    [
        (b"{}", "text/plain", 415),
        (b"{}", "application/x-www-form-urlencoded", 415),
        (b" " * (MAX_BODY_BYTES + 1), JSON_TYPE, 413),
        (b"{}", JSON_TYPE, 200),
    ],
)
def test_http_server_takes_posts_of_short_json_only(body, kind, code):
    with running(lambda path, host, body: (200, JSON_TYPE, body.decode())) as (host, port):
        request = urllib.request.Request(f"http://{host}:{port}/", body, {"Content-Type": kind})
        if code == 200:
            assert urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS).read() == body
            return
        with pytest.raises(urllib.error.HTTPError) as error_info:
            urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
        assert error_info.value.code == code


def test_http_server_without_post_refuses_posts():
    with running() as (host, port):
        request = urllib.request.Request(f"http://{host}:{port}/", b"{}", {"Content-Type": JSON_TYPE})
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)


def test_ctrl_c_ends_http_server_while_it_starts_a_thread(monkeypatch):
    """The new thread already runs, and has released its connection slot."""

    class Interrupted(Thread):
        def start(self) -> None:
            super().start()
            self.join()
            raise KeyboardInterrupt

    monkeypatch.setattr("socketserver.threading.Thread", Interrupted)
    with (
        make_http_server("--port", "127.0.0.1", 0, lambda path, _: (200, "text/plain", path)) as server,
        socket.create_connection(server.server_address, timeout=TIMEOUT_SECONDS) as client,
    ):
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        with pytest.raises(KeyboardInterrupt):
            server.handle_request()
