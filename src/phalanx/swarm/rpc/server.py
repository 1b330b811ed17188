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
from phalanx.swarm.coordinator.swarm_state import ALREADY_SENT, NOT_A_MEMBER, NOT_OPEN_YET, ROUND_CLOSED
from phalanx.swarm.coordinator.update_checks import BUSY, UpdateRejected
from phalanx.swarm.rpc.certificates import NAME_PATTERN
from phalanx.swarm.rpc.protocol import (
    OPTIONS,
    PROTOCOL_VERSION,
    SERVICE,
    Message,
    file_chunks,
    pack,
    tensor_chunks,
    unpack,
)
from phalanx.swarm.rpc.rate_limit import MAX_CONCURRENT_CALLS, RateLimiter
from phalanx.swarm.tensor_files import TensorFile, TensorFileError

MAX_NODES = 64
CALLS_PER_NODE = 3
"""At the same time: a transfer, a wait, and word that it is there."""
MAX_CACHED_DIGESTS = 4
WAIT_SECONDS = 30.0
"""For which a call waits at most for a round."""
CODES = {
    BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    "oversized": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "foreign": grpc.StatusCode.PERMISSION_DENIED,
    NOT_A_MEMBER: grpc.StatusCode.PERMISSION_DENIED,
    ALREADY_SENT: grpc.StatusCode.ALREADY_EXISTS,
    ROUND_CLOSED: grpc.StatusCode.FAILED_PRECONDITION,
    NOT_OPEN_YET: grpc.StatusCode.FAILED_PRECONDITION,
}
"""Of refusals by what they begin with; of others that what was said is wrong."""


def serve(coordinator: Coordinator, address: str, certificates: Path, greeting: Message) -> tuple[grpc.Server, int]:
    """A server under way, and its port (`address` may end in :0). `greeting` is what nodes are told when they join.

    Raises UserError if the address cannot be served.
    """
    workers = ThreadPoolExecutor(CALLS_PER_NODE * MAX_NODES, thread_name_prefix="swarm")
    # Two swarms on one port would each get some of the nodes' calls.
    no_port_sharing = ("grpc.so_reuseport", 0)
    max_streams = ("grpc.max_concurrent_streams", MAX_CONCURRENT_CALLS)
    server = grpc.server(workers, options=[*OPTIONS, no_port_sharing, max_streams])
    server.add_generic_rpc_handlers((_handlers(SwarmService(coordinator, greeting)),))
    key, certificate, authority = ((certificates / name).read_bytes() for name in ("key.pem", "cert.pem", "ca.pem"))
    credentials = grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)
    try:
        port = server.add_secure_port(address, credentials)
    except RuntimeError:
        raise _listen_error(address) from None
    server.start()
    return server, port


def _listen_error(address: str) -> UserError:
    """Why an address cannot be served, which gRPC does not tell."""
    host, _, port = address.rpartition(":")
    reason = "it cannot be listened to"
    try:
        socket.create_server((host.strip("[]"), int(port))).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    fix = "0.0.0.0:PORT listens on all of this machine's; or name another port"
    return UserError("--listen", address, f"cannot be served: {reason}", fix=fix)


def _handlers(service: SwarmService) -> grpc.GenericRpcHandler:
    unary = grpc.unary_unary_rpc_method_handler
    stream_in = grpc.stream_unary_rpc_method_handler
    stream_out = grpc.unary_stream_rpc_method_handler
    methods = {
        **{
            name: unary(_unary_handler(service.pace, getattr(service, name)))
            for name in ("join", "heartbeat", "wait", "leave", "status", "received")
        },
        "put": stream_in(service.put),
        "get": stream_out(service.get),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def _unary_handler(
    limiter: RateLimiter, call: Callable[[str, Message], Message]
) -> Callable[[bytes, grpc.ServicerContext], bytes]:
    """A call of messages as one of bytes, with what it raises as a status."""

    def handle_call(data: bytes, context: grpc.ServicerContext) -> bytes:
        node = certificate_name(context)
        try:
            with limiter.limited(node):
                return pack(call(node, unpack(data)))
        except UpdateRejected as refused:
            raise _abort(context, str(refused)) from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _abort(context, f"malformed: {type(error).__name__}: {error}") from None

    return handle_call


def certificate_name(context: grpc.ServicerContext) -> str:
    """The name in the certificate of who calls."""
    (name,) = context.auth_context()["x509_common_name"]
    if not NAME_PATTERN.fullmatch(name.decode()):
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "the certificate's name is none for a member")
    return str(name.decode())


def _abort(context: grpc.ServicerContext, reason: str) -> Exception:
    """Ends the call; gRPC raises."""
    context.abort(CODES.get(reason.partition(":")[0], grpc.StatusCode.INVALID_ARGUMENT), reason)
    return AssertionError("a call that was ended")


class SwarmService:
    """What nodes can ask for."""

    def __init__(self, coordinator: Coordinator, greeting: Message) -> None:
        self.coordinator = coordinator
        self.greeting = greeting
        self.pace = RateLimiter()
        self._digest_lock = threading.Lock()
        self._digests: dict[Path, dict[str, str]] = {}
        """Of files that do not change any more: a few."""

    def join(self, node: str, message: Message) -> Message:
        """Take part: see `Coordinator.join`. Without a capacity it only asks what for."""
        if message["version"] != PROTOCOL_VERSION:
            raise UpdateRejected(f"version: the swarm speaks {PROTOCOL_VERSION}, this node {message['version']}")
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
        return asdict(self.coordinator.wait(node, message.get("round"), message.get("committed"), seconds=seconds))

    def leave(self, node: str, message: Message) -> Message:
        """It goes."""
        self.coordinator.leave(node, "said so")
        return {}

    def status(self, node: str, message: Message) -> Message:
        """See `Coordinator.status`."""
        return self.coordinator.status()

    def received(self, node: str, message: Message) -> Message:
        """How many bytes of its update are here."""
        partial_path = self.coordinator.store.partial_update_path(int(message["round"]), node, str(message["mark"]))
        return {"bytes": partial_path.stat().st_size if partial_path.exists() else 0}

    def put(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """An update: who it is of is in the certificate, what of in the first message; then its bytes, and last their
        checksum."""
        node = certificate_name(context)
        round_number = -1
        try:
            with self.pace.limited(node):
                header = unpack(next(requests))
                round_number = int(header["round"])
                offset = int(header["offset"])
                upload_id = str(header["mark"])
                with self.coordinator.receiving_update(node, round_number, upload_id) as (path, max_bytes):
                    _receive_file(path, offset, max_bytes, size_bytes=int(header["bytes"]), requests=requests)
                    self.coordinator.accept_update(
                        node, round_number, upload_id, tokens=int(header["tokens"]), steps=int(header["steps"])
                    )
            return pack({})
        except UpdateRejected as refused:
            reason = str(refused)
        except (KeyError, TypeError, ValueError, StopIteration) as error:
            reason = f"malformed: {type(error).__name__}: {error}"
        if not reason.startswith(BUSY):
            self.coordinator.record_refusal(node, round_number, reason)
        raise _abort(context, reason)

    def get(self, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """What a round came to, piece by piece, but for the node's `local_keys`; or, without a round, all
        weights: the present ones, or those after so many rounds as it has a part of."""
        node = certificate_name(context)
        try:
            message = unpack(data)
            local_keys = set(message.get("has", ()))
            round_number = int(message.get("round", -1))
            requested_committed = int(message.get("committed", -1))
            with self.pace.limited(node):
                yield from self._stream_weights(node, round_number, requested_committed, local_keys=local_keys)
        except UpdateRejected as refused:
            raise _abort(context, str(refused)) from None
        except TensorFileError:  # or cut off, if power failed: nobody waited for the disk to have it
            context.abort(grpc.StatusCode.NOT_FOUND, "that round's result is gone: take all weights")
        except (TypeError, ValueError) as error:
            raise _abort(context, f"malformed: {type(error).__name__}: {error}") from None

    def _stream_weights(
        self, node: str, round_number: int, requested_committed: int, local_keys: set[str]
    ) -> Iterator[bytes]:
        store = self.coordinator.store
        is_included = round_number >= 0 and self.coordinator.was_included(node, round_number)
        if round_number >= 0 and not is_included:  # what it has is not what all have
            local_keys = set()
        with self.coordinator.changed:
            committed = self.coordinator.state.committed if requested_committed < 0 else requested_committed
            if round_number < 0 and committed == self.coordinator.state.committed:
                store.snapshot(committed)
            path = store.base_of_round(committed) if round_number < 0 else store.broadcast_path(round_number)
        with TensorFile(path) as file:
            keys = [key for key in file.shapes if key not in local_keys]
            with self._digest_lock:  # of many that ask at once, for one
                if path not in self._digests:
                    self._digests = dict([*self._digests.items()][-MAX_CACHED_DIGESTS + 1 :]) | {
                        path: _tensor_digests(file)
                    }
                digests = self._digests[path]
            piece_digests = {key: digests[key] for key in keys}
            yield pack({"committed": committed, "counted": is_included, "pieces": piece_digests})
            yield from tensor_chunks(file, keys)


def _tensor_digests(file: TensorFile) -> dict[str, str]:
    """The checksum of every tensor in a file."""
    digests = {}
    for key in file.shapes:
        checksum = xxhash.xxh3_128()
        for chunk in tensor_chunks(file, [key]):
            checksum.update(chunk)
        digests[key] = checksum.hexdigest()
    return digests


def _receive_file(path: Path, offset: int, max_bytes: int, size_bytes: int, requests: Iterator[bytes]) -> None:
    """Take the bytes of a file from `offset` on. What came stays if the connection breaks: it goes on from there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    received_bytes = path.stat().st_size if path.exists() else 0
    if offset not in (0, received_bytes):
        raise UpdateRejected(f"malformed: it begins at byte {offset}, where {received_bytes} are here")
    if size_bytes > max_bytes:
        raise UpdateRejected(f"oversized: {size_bytes} bytes, where {max_bytes} are allowed")
    checksum = xxhash.xxh3_128()
    with path.open("r+b" if path.exists() else "wb") as file:
        file.truncate(offset)
        for chunk in file_chunks(file) if offset else ():
            checksum.update(chunk)
        while offset < size_bytes:
            chunk = next(requests, b"")
            offset += len(chunk)
            if not chunk:
                raise UpdateRejected(f"malformed: {offset} of {size_bytes} bytes")
            if offset > size_bytes:
                raise UpdateRejected(f"oversized: more than the {size_bytes} bytes that it said")
            checksum.update(chunk)
            file.write(chunk)
    if unpack(next(requests))["checksum"] != checksum.hexdigest():
        path.unlink()
        raise UpdateRejected("damaged: its checksum is another")
