"""Rendezvous of the nodes of a run: host detection, store probe, and the address of this node."""

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
from phalanx.spec.formatting import plural

KEEP_ALIVE_SECONDS = 2
KEEP_ALIVE_ATTEMPTS = 5
"""Keep-alive attempts of nodes to the rendezvous host. A node that misses all of them counts as lost."""
RETRY_SECONDS = 1.0
ANSWER_SECONDS = 10.0
"""Timeout in seconds for an answer of the store."""
PROBE_ADDRESS = "198.51.100.1"
"""An unassigned address (RFC 5737)."""
SIOCGIFADDR = 0x8915


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Rendezvous address of a run, and its numbers of nodes."""

    name: str
    """Name of the run. Nodes of other runs do not join."""
    host: str
    port: int
    min_nodes: int
    max_nodes: int
    join_seconds: float
    last_call_seconds: int

    @property
    def endpoint(self) -> str:
        """Address as HOST:PORT."""
        return f"{self.host}:{self.port}"

    @property
    def is_host(self) -> bool:
        """True if this node hosts the rendezvous: its address can be bound."""
        with socket.socket() as probe:
            try:
                probe.bind((self.host, 0))
            except OSError:
                return False
        return True


SINGLE_NODE = Rendezvous(
    name="", host="localhost", port=0, min_nodes=1, max_nodes=1, join_seconds=60, last_call_seconds=1
)
"""Rendezvous of a single node."""


class RendezvousError(LocalNodeError):
    """Too few nodes joined in time; a retry may succeed."""


def expected_nodes(rendezvous: Rendezvous) -> str:
    """Describe the nodes that this node waits for, where, and how long."""
    nodes_text = plural(rendezvous.max_nodes, "node")
    timeout_text = f"at most {rendezvous.join_seconds:g} s"
    if rendezvous.min_nodes < rendezvous.max_nodes:
        nodes_text = f"{rendezvous.min_nodes} to {nodes_text}"
        timeout_text += f" for {rendezvous.min_nodes}, then {rendezvous.last_call_seconds:g} s for more"
    return f"waiting for {nodes_text} at {rendezvous.endpoint}: {timeout_text}"


def wait_for_host(rendezvous: Rendezvous, deadline: float) -> None:
    """Wait until the rendezvous host answers.

    PyTorch's store can wait too, but prints its stack while waiting.
    """
    while not rendezvous.is_host:
        reached = False
        with suppress(OSError), socket.create_connection((rendezvous.host, rendezvous.port), timeout=RETRY_SECONDS):
            reached = True
        if reached and _is_store(rendezvous):
            return
        if time.monotonic() > deadline:
            if reached:
                problem = "is the address of a service that is not a Phalanx rendezvous"
                raise UserError("--rendezvous", rendezvous.endpoint, problem, "use another port")
            fix = "start the command on this host too, and check that other nodes can reach the port"
            problem = f"does not answer within {rendezvous.join_seconds:g} s"
            raise RendezvousError("--rendezvous", rendezvous.endpoint, problem, fix)
        time.sleep(RETRY_SECONDS)


def _is_store(rendezvous: Rendezvous) -> bool:
    """Return whether the service at the address is a PyTorch store.

    The store's client waits indefinitely for a silent service and handles no signals meanwhile. Another thread
    therefore makes the request.
    """
    answered = Event()

    def connect() -> None:
        with suppress(DistError):
            timeout = timedelta(seconds=ANSWER_SECONDS)
            TCPStore(rendezvous.host, rendezvous.port, is_master=False, wait_for_workers=False, timeout=timeout)
            answered.set()

    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    return answered.is_set()


def make_rendezvous_handler(rendezvous: Rendezvous) -> RendezvousHandler:
    """Return torchrun's rendezvous handler."""
    return get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint=rendezvous.endpoint,
            run_id=rendezvous.name or uuid.uuid4().hex,
            min_nodes=rendezvous.min_nodes,
            max_nodes=rendezvous.max_nodes,
            local_addr=local_address(rendezvous),
            is_host=rendezvous.is_host,
            join_timeout=int(rendezvous.join_seconds),
            last_call_timeout=rendezvous.last_call_seconds,
            read_timeout=10,
            keep_alive_interval=KEEP_ALIVE_SECONDS,
            keep_alive_max_attempt=KEEP_ALIVE_ATTEMPTS,
        )
    )


def local_address(rendezvous: Rendezvous) -> str:
    """Return the address of this node on the network of the other nodes.

    Host names of nodes often do not resolve or belong to another network. A machine's own name often resolves to its
    loopback (Debian), which others cannot reach.
    """
    address = _find_local_address(rendezvous.host)
    if rendezvous is not SINGLE_NODE and ip_address(address).is_loopback:
        with suppress(OSError):
            return _find_local_address(PROBE_ADDRESS)
    return address


def _find_local_address(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # sends no packet
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the network interface that has an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    problem = "is not the address of a network interface of this machine"
    raise UserError("--rendezvous", address, problem, "set GLOO_SOCKET_IFNAME to the name of an interface")
