"""Limits on the connections of a coordinator before TLS has shown who they are.

gRPC limits their total number and the time of a handshake. At the maximum it refuses whoever comes next, so a stranger
with many idle connections could keep all nodes out. `StrangerLimit` therefore closes connections that have made no
call: those of the address with the most first, and the oldest of them first.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from urllib.parse import unquote

from phalanx.spec.errors import UserError

MAX_NODES = 64
MAX_CONNECTIONS = 512
RESERVED_DESCRIPTORS = 5 * MAX_NODES
"""Descriptors for files: an update that is received, one that is aggregated and a download per node, and the model."""
HANDSHAKE_SECONDS = 10.0
"""Time for TLS and the first message of a connection, over a link that is busy with an update."""
IDLE_SECONDS = 60.0
"""Time without a call after which a connection is closed; nodes send a heartbeat every 5 s."""
SWEEP_SECONDS = 0.2
DESCRIPTORS = Path("/dev/fd")
"""This process's open descriptors, on Linux and macOS."""
INTERNET_FAMILIES = socket.AF_INET, socket.AF_INET6


def connection_limit() -> int:
    """Raise the limit of descriptors as far as needed, and return the maximum number of connections.

    Raises UserError if the limit is too low for the files of a coordinator and the connections of its nodes.
    """
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = MAX_CONNECTIONS + RESERVED_DESCRIPTORS
    if soft_limit != resource.RLIM_INFINITY and soft_limit < needed:
        soft_limit = needed if hard_limit == resource.RLIM_INFINITY else min(needed, hard_limit)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard_limit))
    if soft_limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    connections = min(MAX_CONNECTIONS, soft_limit - RESERVED_DESCRIPTORS)
    if connections < 2 * MAX_NODES:
        fix = f"raise the limit: ulimit -n {needed}"
        raise UserError("ulimit -n", soft_limit, "is too low for a coordinator's files and connections", fix)
    return connections


def listen_error(address: str) -> UserError:
    """Return why the server cannot listen on an address, which gRPC does not report."""
    host, _, port = address.rpartition(":")
    reason = "listening failed"
    try:
        socket.create_server((host.strip("[]"), int(port))).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    fix = "use 0.0.0.0:PORT to listen on all addresses of this machine, or another port"
    return UserError("--listen", address, f"cannot be served: {reason}", fix)


class StrangerLimit:
    """The connections to a port that have made no call yet."""

    def __init__(self, port: int, max_strangers: int) -> None:
        self.port = port
        self.max_strangers = max_strangers
        self._known: set[str] = set()
        """Addresses and ports whose certificate has been seen."""
        self._first_seen: dict[str, float] = {}

    def admit(self, peer: str) -> None:
        """Keep the connection of a call, by gRPC's name of the caller: "ipv4:127.0.0.1:7077"."""
        host, _, port = unquote(peer).partition(":")[2].rpartition(":")
        self._known.add(_format_peer(host.strip("[]"), port))

    def sweep(self) -> int:
        """Close connections of strangers beyond the limit, and return their number."""
        connections = dict(self._list_connections())
        now = time.monotonic()
        self._first_seen = {peer: self._first_seen.get(peer, now) for peer in connections}
        self._known.difference_update(self._known - connections.keys())
        excess = self._rank_strangers(connections.keys() - self._known)[self.max_strangers :]
        for peer in excess:
            with suppress(OSError), socket.socket(fileno=os.dup(connections[peer])) as connection:
                # The descriptor may by now belong to another connection.
                if _peer_address(connection) == peer:
                    # gRPC notices the shutdown, and closes the descriptor.
                    connection.shutdown(socket.SHUT_RDWR)
        return len(excess)

    def _rank_strangers(self, strangers: Iterable[str]) -> list[str]:
        """Return strangers, those to keep first: the newest of each address, then the second of each, and so on."""
        by_host: dict[str, list[str]] = defaultdict(list)
        for peer in sorted(strangers, key=self._first_seen.__getitem__, reverse=True):
            by_host[peer.rpartition(":")[0]].append(peer)
        return [peer for peers in zip_longest(*by_host.values()) for peer in peers if peer is not None]

    def _list_connections(self) -> Iterator[tuple[str, int]]:
        """Yield address and descriptor of each connection to the port."""
        for name in os.listdir(DESCRIPTORS):
            # The descriptor may be no connected socket, or may have been closed meanwhile.
            with suppress(OSError):
                connection = socket.socket(fileno=int(name))
                try:
                    if connection.family in INTERNET_FAMILIES and connection.getsockname()[1] == self.port:
                        yield _peer_address(connection), int(name)
                finally:
                    connection.detach()


def _peer_address(connection: socket.socket) -> str:
    """Return address and port of the other end of a connection."""
    return _format_peer(*connection.getpeername()[:2])


def _format_peer(host: str, port: object) -> str:
    """Return address and port, the same for each form of an address: with a zone, or of IPv4 as IPv6."""
    return f"{host.partition('%')[0].removeprefix('::ffff:')}:{port}"
