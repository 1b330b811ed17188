"""Where the nodes of a run meet: who waits there, what answers, and by which address others reach this node."""

from __future__ import annotations

import fcntl
import socket
import struct
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from threading import Event, Thread

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from phalanx.spec.errors import LocalNodeError, UserError

KEEP_ALIVE_SECONDS, KEEP_ALIVE_ATTEMPTS = 2, 5
"""Of nodes to the place where they meet; one that is silent for all of them is gone."""
RETRY_SECONDS = 1.0
ANSWER_SECONDS = 10.0
"""For the store to answer."""
PROBE_ADDRESS = "198.51.100.1"
"""An address that is nobody's (RFC 5737)."""
SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Rendezvous:
    """Where the nodes of a run meet, and how many there are."""

    name: str
    """Of the run: nodes of others do not join."""
    host: str
    port: int
    min_nodes: int
    max_nodes: int
    join_seconds: float
    last_call_seconds: int

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def is_host(self) -> bool:
        """Whether this node is the one where they meet: its address can be bound."""
        with socket.socket() as probe:
            try:
                probe.bind((self.host, 0))
            except OSError:
                return False
        return True


SINGLE_NODE = Rendezvous("", "localhost", 0, 1, 1, join_seconds=60, last_call_seconds=1)
"""A node by itself."""


class RendezvousError(LocalNodeError):
    """Too few nodes came in time; they may the next time."""


def wait_for_host(meeting: Rendezvous, deadline: float) -> None:
    """Until the place where nodes meet answers. (PyTorch's store waits too, and prints its stack meanwhile.)"""
    while not meeting.is_host:
        reached = False
        with suppress(OSError), socket.create_connection((meeting.host, meeting.port), timeout=RETRY_SECONDS):
            reached = True
        if reached and _is_store(meeting):
            return
        if time.monotonic() > deadline:
            if reached:
                problem = "what answers there is no place where nodes meet"
                raise UserError("--rendezvous", meeting.endpoint, problem, "give another port")
            fix = "start the command there too, and check that this port can be reached"
            raise RendezvousError(
                "--rendezvous", meeting.endpoint, f"nobody answered in {meeting.join_seconds:g} s", fix
            )
        time.sleep(RETRY_SECONDS)


def _is_store(meeting: Rendezvous) -> bool:
    """Whether what answers is a store of PyTorch's. Its client waits for good for the word of one that says nothing,
    and hears no signal meanwhile: so another thread asks."""
    found = Event()

    def ask() -> None:
        with suppress(DistError):
            patience = timedelta(seconds=ANSWER_SECONDS)
            TCPStore(meeting.host, meeting.port, is_master=False, wait_for_workers=False, timeout=patience)
            found.set()

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    return found.is_set()


def make_rendezvous_handler(meeting: Rendezvous) -> RendezvousHandler:
    """torchrun's way to meet there."""
    return get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint=meeting.endpoint,
            run_id=meeting.name or uuid.uuid4().hex,
            min_nodes=meeting.min_nodes,
            max_nodes=meeting.max_nodes,
            local_addr=local_address(meeting),
            is_host=meeting.is_host,
            join_timeout=int(meeting.join_seconds),
            last_call_timeout=meeting.last_call_seconds,
            read_timeout=10,
            keep_alive_interval=KEEP_ALIVE_SECONDS,
            keep_alive_max_attempt=KEEP_ALIVE_ATTEMPTS,
        )
    )


def local_address(meeting: Rendezvous) -> str:
    """That of this node by which it reaches the others: names of nodes often do not resolve, or to another network, and
    a machine's own often to its loopback (Debian), where nobody else reaches it."""
    own = _address_towards(meeting.host)
    if meeting is not SINGLE_NODE and ip_address(own).is_loopback:
        with suppress(OSError):
            return _address_towards(PROBE_ADDRESS)
    return own


def _address_towards(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # sends nothing
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The network interface that has an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    raise UserError("--rendezvous", address, "belongs to no network interface here", "set GLOO_SOCKET_IFNAME")
