"""The server of local pages: what it closes and what it refuses."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import pytest

from phalanx.cli.common import http_server
from phalanx.cli.common.http_server import JSON_TYPE, MAX_BODY_BYTES, make_http_server
from tests.helpers.trained_runs import TIMEOUT_SECONDS


@contextmanager
def running(post=None) -> Iterator[tuple[str, int]]:
    with make_http_server("--port", "127.0.0.1", 0, lambda path, host: (200, "text/plain", path), post) as server:
        thread = Thread(target=server.serve_forever)
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
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
        assert caught.value.code == code


def test_http_server_without_post_refuses_posts():
    with running() as (host, port):
        request = urllib.request.Request(f"http://{host}:{port}/", b"{}", {"Content-Type": JSON_TYPE})
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
