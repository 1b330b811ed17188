"""The coordinator's end of the wire. Who calls is who its certificate says, whatever else it says."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import grpc
import xxhash

from phalanx.spec.errors import UserError
from phalanx.swarm.coordinator.coordinator import Coordinator
from phalanx.swarm.coordinator.ledger import ALREADY, EARLY, LATE, STRANGER
from phalanx.swarm.coordinator.update_checks import BUSY, UpdateRejected
from phalanx.swarm.rpc.certificates import NAME
from phalanx.swarm.rpc.protocol import OPTIONS, SERVICE, VERSION, Message, file_chunks, pack, tensor_chunks, unpack
from phalanx.swarm.rpc.rate_limit import UNDER_WAY, RateLimiter
from phalanx.swarm.tensor_files import TensorFile, TensorFileError

NODES, CALLS_PER_NODE = 64, 3
"""At the same time: a transfer, a wait, and word that it is there."""
DIGESTS_KEPT = 4
WAIT_SECONDS = 30.0
"""For which a call waits at most for a round."""
CODES = {
    BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    "oversized": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "foreign": grpc.StatusCode.PERMISSION_DENIED,
    STRANGER: grpc.StatusCode.PERMISSION_DENIED,
    ALREADY: grpc.StatusCode.ALREADY_EXISTS,
    LATE: grpc.StatusCode.FAILED_PRECONDITION,
    EARLY: grpc.StatusCode.FAILED_PRECONDITION,
}
"""Of refusals by what they begin with; of others that what was said is wrong."""


def serve(coordinator: Coordinator, address: str, certificates: Path, greeting: Message) -> tuple[grpc.Server, int]:
    """A server under way, and its port (`address` may end in :0). `greeting` is what nodes are told when they join.

    Raises UserError if the address cannot be served.
    """
    workers = ThreadPoolExecutor(CALLS_PER_NODE * NODES, thread_name_prefix="swarm")
    # Two swarms on one port would each get some of the nodes' calls.
    alone, streams = ("grpc.so_reuseport", 0), ("grpc.max_concurrent_streams", UNDER_WAY)
    server = grpc.server(workers, options=[*OPTIONS, alone, streams])
    server.add_generic_rpc_handlers((_handlers(SwarmService(coordinator, greeting)),))
    key, own, authority = ((certificates / name).read_bytes() for name in ("key.pem", "cert.pem", "ca.pem"))
    credentials = grpc.ssl_server_credentials([(key, own)], authority, require_client_auth=True)
    try:
        port = server.add_secure_port(address, credentials)
    except RuntimeError:
        raise _unlistenable(address) from None
    server.start()
    return server, port


def _unlistenable(address: str) -> UserError:
    """Why an address cannot be served, which gRPC does not tell."""
    host, _, port = address.rpartition(":")
    why = "it cannot be listened to"
    try:
        socket.create_server((host.strip("[]"), int(port))).close()
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    fix = "0.0.0.0:PORT listens on all of this machine's; or name another port"
    return UserError("--listen", address, f"cannot be served: {why}", fix)


def _handlers(calls: SwarmService) -> grpc.GenericRpcHandler:
    unary, up, down = (
        grpc.unary_unary_rpc_method_handler,
        grpc.stream_unary_rpc_method_handler,
        grpc.unary_stream_rpc_method_handler,
    )
    methods = {
        **{
            name: unary(_unary_handler(calls.pace, getattr(calls, name)))
            for name in ("join", "heartbeat", "wait", "leave", "status", "received")
        },
        "put": up(calls.put),
        "get": down(calls.get),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def _unary_handler(
    pace: RateLimiter, call: Callable[[str, Message], Message]
) -> Callable[[bytes, grpc.ServicerContext], bytes]:
    """A call of messages as one of bytes, with what it raises as a status."""

    def answer(data: bytes, context: grpc.ServicerContext) -> bytes:
        node = certificate_name(context)
        try:
            with pace.limited(node):
                return pack(call(node, unpack(data)))
        except UpdateRejected as refused:
            raise _aborted(context, str(refused)) from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _aborted(context, f"malformed: {type(error).__name__}: {error}") from None

    return answer


def certificate_name(context: grpc.ServicerContext) -> str:
    """The name in the certificate of who calls."""
    (name,) = context.auth_context()["x509_common_name"]
    if not NAME.fullmatch(name.decode()):
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "the certificate's name is none for a member")
    return str(name.decode())


def _aborted(context: grpc.ServicerContext, why: str) -> Exception:
    """Ends the call; gRPC raises."""
    context.abort(CODES.get(why.partition(":")[0], grpc.StatusCode.INVALID_ARGUMENT), why)
    return AssertionError("a call that was ended")


class SwarmService:
    """What nodes can ask for."""

    def __init__(self, coordinator: Coordinator, greeting: Message) -> None:
        self.coordinator, self.greeting = coordinator, greeting
        self.pace, self._digesting = RateLimiter(), threading.Lock()
        self._digests: dict[Path, dict[str, str]] = {}
        """Of files that do not change any more: a few."""

    def join(self, node: str, message: Message) -> Message:
        """Take part: see `Coordinator.join`. Without a capacity it only asks what for."""
        if message["version"] != VERSION:
            raise UpdateRejected(f"version: the swarm speaks {VERSION}, this node {message['version']}")
        if "capacity" in message:
            begin = bool(message.get("begin", True))
            self.coordinator.join(node, float(message["capacity"]), str(message["text"]), begin)
        return self.greeting

    def heartbeat(self, node: str, message: Message) -> Message:
        """It is there; what is it to do?"""
        return asdict(self.coordinator.heartbeat(node))

    def wait(self, node: str, message: Message) -> Message:
        """See `Coordinator.wait`."""
        seconds = min(WAIT_SECONDS, float(message["seconds"]))
        return asdict(self.coordinator.wait(node, message.get("round"), message.get("committed"), seconds))

    def leave(self, node: str, message: Message) -> Message:
        """It goes."""
        self.coordinator.leave(node, "said so")
        return {}

    def status(self, node: str, message: Message) -> Message:
        """See `Coordinator.status`."""
        return self.coordinator.status()

    def received(self, node: str, message: Message) -> Message:
        """How many bytes of its update are here."""
        part = self.coordinator.store.partial_update_path(int(message["round"]), node, str(message["mark"]))
        return {"bytes": part.stat().st_size if part.exists() else 0}

    def put(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """An update: who it is of is in the certificate, what of in the first message; then its bytes, and last their
        checksum."""
        node, number = certificate_name(context), -1
        try:
            with self.pace.limited(node):
                head = unpack(next(requests))
                number, offset, mark = int(head["round"]), int(head["offset"]), str(head["mark"])
                with self.coordinator.receiving_update(node, number, mark) as (path, limit):
                    _receive(path, offset, limit, int(head["bytes"]), requests)
                    self.coordinator.accept_update(node, number, mark, int(head["tokens"]), int(head["steps"]))
            return pack({})
        except UpdateRejected as refused:
            why = str(refused)
        except (KeyError, TypeError, ValueError, StopIteration) as error:
            why = f"malformed: {type(error).__name__}: {error}"
        if not why.startswith(BUSY):
            self.coordinator.record_refusal(node, number, why)
        raise _aborted(context, why)

    def get(self, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """What a round came to, piece by piece, but for what the node says that it `has`; or, without a round, all
        weights: the present ones, or those after so many rounds as it has a part of."""
        node = certificate_name(context)
        try:
            message = unpack(data)
            has, number = set(message.get("has", ())), int(message.get("round", -1))
            begun = int(message.get("committed", -1))
            with self.pace.limited(node):
                yield from self._weights(node, number, begun, has)
        except UpdateRejected as refused:
            raise _aborted(context, str(refused)) from None
        except TensorFileError:  # or cut off, if power failed: nobody waited for the disk to have it
            context.abort(grpc.StatusCode.NOT_FOUND, "that round's result is gone: take all weights")
        except (TypeError, ValueError) as error:
            raise _aborted(context, f"malformed: {type(error).__name__}: {error}") from None

    def _weights(self, node: str, number: int, begun: int, has: set[str]) -> Iterator[bytes]:
        store = self.coordinator.store
        counted = number >= 0 and self.coordinator.was_included(node, number)
        if number >= 0 and not counted:  # what it has is not what all have
            has = set()
        with self.coordinator.changed:
            committed = self.coordinator.ledger.committed if begun < 0 else begun
            if number < 0 and committed == self.coordinator.ledger.committed:
                store.snapshot(committed)
            path = store.base_of_round(committed) if number < 0 else store.broadcast_path(number)
        with TensorFile(path) as file:
            keys = [key for key in file.shapes if key not in has]
            with self._digesting:  # of many that ask at once, for one
                if path not in self._digests:
                    self._digests = dict([*self._digests.items()][-DIGESTS_KEPT + 1 :]) | {path: _digests_of(file)}
                digests = self._digests[path]
            of_pieces = {key: digests[key] for key in keys}
            yield pack({"committed": committed, "counted": counted, "pieces": of_pieces})
            yield from tensor_chunks(file, keys)


def _digests_of(file: TensorFile) -> dict[str, str]:
    """The checksum of every tensor in a file."""
    found = {}
    for key in file.shapes:
        seen = xxhash.xxh3_128()
        for chunk in tensor_chunks(file, [key]):
            seen.update(chunk)
        found[key] = seen.hexdigest()
    return found


def _receive(path: Path, offset: int, limit: int, size: int, requests: Iterator[bytes]) -> None:
    """Take the bytes of a file from `offset` on. What came stays if the connection breaks: it goes on from there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    here = path.stat().st_size if path.exists() else 0
    if offset not in (0, here):
        raise UpdateRejected(f"malformed: it begins at byte {offset}, where {here} are here")
    if size > limit:
        raise UpdateRejected(f"oversized: {size} bytes, where {limit} are allowed")
    seen = xxhash.xxh3_128()
    with path.open("r+b" if path.exists() else "wb") as file:
        file.truncate(offset)
        for chunk in file_chunks(file) if offset else ():
            seen.update(chunk)
        while offset < size:
            chunk = next(requests, b"")
            offset += len(chunk)
            if not chunk:
                raise UpdateRejected(f"malformed: {offset} of {size} bytes")
            if offset > size:
                raise UpdateRejected(f"oversized: more than the {size} bytes that it said")
            seen.update(chunk)
            file.write(chunk)
    if unpack(next(requests))["checksum"] != seen.hexdigest():
        path.unlink()
        raise UpdateRejected("damaged: its checksum is another")
