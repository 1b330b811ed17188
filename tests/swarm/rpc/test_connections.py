"""Limits on the connections of a coordinator."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import pytest

from phalanx.spec.errors import UserError
from phalanx.swarm.rpc.connections import (
    MAX_CONNECTIONS,
    RESERVED_DESCRIPTORS,
    StrangerLimit,
    _peer_address,
    connection_limit,
)

TIMEOUT_SECONDS = 10.0


class Listener:
    """A port with accepted connections, by their order."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port = self.listener.getsockname()[1]
        self.clients: list[socket.socket] = []
        self.accepted: list[socket.socket] = []

    def connect(self, host: str = "127.0.0.1") -> str:
        """Open a connection from an address, and return gRPC's name of the caller."""
        client = socket.create_connection(("127.0.0.1", self.port), TIMEOUT_SECONDS, source_address=(host, 0))
        self.clients.append(self.stack.enter_context(client))
        self.accepted.append(self.stack.enter_context(self.listener.accept()[0]))
        return f"ipv4:{host}:{client.getsockname()[1]}"

    def closed(self) -> list[int]:
        """Return which connections were closed by the other end."""
        numbers = []
        for number, client in enumerate(self.clients):
            client.setblocking(False)
            with suppress(BlockingIOError):
                numbers += [number] if client.recv(1) == b"" else []
        return numbers


@pytest.fixture
def listener() -> Iterator[Listener]:
    with ExitStack() as stack:
        yield Listener(stack)


def test_stranger_limit_closes_oldest_connections_without_a_call(listener: Listener) -> None:
    limit = StrangerLimit(listener.port, max_strangers=3)
    for number in range(6):
        peer = listener.connect()
        if number == 1:
            limit.admit(peer)
        limit.sweep()
    assert listener.closed() == [0, 2]


def test_stranger_limit_closes_connections_of_the_address_with_the_most(listener: Listener) -> None:
    limit = StrangerLimit(listener.port, max_strangers=4)
    for host in ("127.0.0.2", *["127.0.0.1"] * 6):  # the first is the oldest, and the only one of its address
        listener.connect(host)
        limit.sweep()
    assert 0 not in listener.closed()
    assert len(listener.closed()) == 3


def test_stranger_limit_forgets_admitted_connection_when_it_is_closed(listener: Listener) -> None:
    limit = StrangerLimit(listener.port, max_strangers=1)
    limit.admit(listener.connect())
    limit.sweep()
    listener.accepted[0].close()
    limit.sweep()
    assert not limit._known


def test_connection_limit_reserves_descriptors_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [0, 0]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, changed: limits.__setitem__(slice(None), changed))
    limits[:] = 256, 4096
    assert connection_limit() == MAX_CONNECTIONS
    assert limits == [MAX_CONNECTIONS + RESERVED_DESCRIPTORS, 4096]
    limits[:] = 700, 700
    assert connection_limit() == 700 - RESERVED_DESCRIPTORS
    limits[:] = 256, 256
    with pytest.raises(UserError, match=r"ulimit -n = 256 is too low"):
        connection_limit()


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:7", ("127.0.0.1", 7)),
        ("ipv6:%5B::1%5D:7", ("::1", 7, 0, 0)),
        ("ipv6:[::ffff:127.0.0.1]:7", ("::ffff:127.0.0.1", 7, 0, 0)),
        ("ipv6:%5Bfe80::1%252%5D:7", ("fe80::1", 7, 0, 2)),
        ("ipv6:[fe80::1%25eth0]:7", ("fe80::1%eth0", 7, 0, 2)),
    ],
)
def test_stranger_limit_knows_admitted_peer_by_every_form_of_its_address(
    peer: str, address: tuple[object, ...]
) -> None:
    limit = StrangerLimit(0, max_strangers=1)
    limit.admit(peer)
    assert limit._known == {_peer_address(SimpleNamespace(getpeername=lambda: address))}
