"""RPC server of the coordinator. The certificate alone identifies the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import grpc
import xxhash

from phalanx.swarm.coordinator.coordinator import Coordinator
from phalanx.swarm.coordinator.store import check_digest
from phalanx.swarm.coordinator.swarm_state import ALREADY_SENT, ANOTHER_TEXT, NOT_A_MEMBER, NOT_OPEN_YET, ROUND_CLOSED
from phalanx.swarm.coordinator.update_checks import BUSY, UpdateRejected
from phalanx.swarm.rpc.certificates import NAME_PATTERN, certificate_member
from phalanx.swarm.rpc.connections import (
    HANDSHAKE_SECONDS,
    IDLE_SECONDS,
    MAX_NODES,
    SWEEP_SECONDS,
    StrangerLimit,
    connection_limit,
    listen_error,
)
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

CALLS_PER_NODE = 3
"""Concurrent calls of a node: a transfer, a wait, and a heartbeat."""
MAX_CACHED_DIGESTS = 4
WAIT_SECONDS = 30.0
"""Maximum duration of a call that waits for a round."""
NOT_PERMITTED = "not permitted"
DAMAGED = "damaged model"
CODES = {
    BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    "oversized": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "foreign": grpc.StatusCode.PERMISSION_DENIED,
    NOT_PERMITTED: grpc.StatusCode.PERMISSION_DENIED,
    DAMAGED: grpc.StatusCode.DATA_LOSS,
    NOT_A_MEMBER: grpc.StatusCode.PERMISSION_DENIED,
    ANOTHER_TEXT: grpc.StatusCode.PERMISSION_DENIED,
    ALREADY_SENT: grpc.StatusCode.ALREADY_EXISTS,
    ROUND_CLOSED: grpc.StatusCode.FAILED_PRECONDITION,
    NOT_OPEN_YET: grpc.StatusCode.FAILED_PRECONDITION,
}
"""Status codes of rejections by the first word of the reason; INVALID_ARGUMENT for others."""


def serve(coordinator: Coordinator, address: str, certificates: Path, greeting: Message) -> tuple[grpc.Server, int]:
    """Start a server, and return it with its port.

    The address may end in :0. `greeting` is the answer to nodes that join. Raises UserError if the server cannot listen
    on the address.
    """
    operator = certificate_member(certificates)
    max_connections = connection_limit()
    workers = ThreadPoolExecutor(CALLS_PER_NODE * MAX_NODES, thread_name_prefix="swarm")
    # Two swarms on one port would each get some of the nodes' calls.
    no_port_sharing = ("grpc.so_reuseport", 0)
    limits = [
        ("grpc.max_concurrent_streams", MAX_CONCURRENT_CALLS),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_SECONDS)),
        ("grpc.max_connection_idle_ms", int(1000 * IDLE_SECONDS)),
    ]
    server = grpc.server(workers, options=[*OPTIONS, no_port_sharing, *limits])
    key, certificate, authority = ((certificates / name).read_bytes() for name in ("key.pem", "cert.pem", "ca.pem"))
    credentials = grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)
    try:
        port = server.add_secure_port(address, credentials)
    except RuntimeError:
        raise listen_error(address) from None
    strangers = StrangerLimit(port, max_connections // 2)
    service = SwarmService(coordinator, greeting, operator, strangers)
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(_wrap_message_call(service, getattr(service, name)))
        for name in ("join", "heartbeat", "wait", "leave", "status", "text", "received")
    }
    handlers["put"] = grpc.stream_unary_rpc_method_handler(service.put)
    handlers["get"] = grpc.unary_stream_rpc_method_handler(service.get)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.start()

    def sweep_until_stopped() -> None:
        while server.wait_for_termination(SWEEP_SECONDS):
            with suppress(OSError):
                strangers.sweep()

    threading.Thread(target=sweep_until_stopped, daemon=True).start()
    return server, port


def _wrap_message_call(
    service: SwarmService, call: Callable[[str, Message], Message]
) -> Callable[[bytes, grpc.ServicerContext], bytes]:
    """Wrap a call with messages as a call with bytes, with exceptions as status codes."""

    def handle_call(data: bytes, context: grpc.ServicerContext) -> bytes:
        node = service.identify(context)
        try:
            with service.rate_limiter.limited(node):
                return pack(call(node, unpack(data)))
        except UpdateRejected as refused:
            raise _abort_call(context, str(refused)) from None
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise _abort_call(context, f"malformed: {type(error).__name__}: {error}") from None

    return handle_call


def _abort_call(context: grpc.ServicerContext, reason: str) -> Exception:
    """End the call with a status; gRPC raises an exception."""
    context.abort(CODES.get(reason.partition(":")[0], grpc.StatusCode.INVALID_ARGUMENT), reason)
    return AssertionError("a call that was ended")


class SwarmService:
    """The calls that nodes can make."""

    def __init__(self, coordinator: Coordinator, greeting: Message, operator: str, strangers: StrangerLimit) -> None:
        self.coordinator = coordinator
        self.greeting = greeting
        self.operator = operator
        """The name in the coordinator's own certificate."""
        self.strangers = strangers
        self.rate_limiter = RateLimiter()
        self._digest_lock = threading.Lock()
        self._digests: dict[Path, dict[str, str]] = {}
        """Checksums of a few files that no longer change."""

    def identify(self, context: grpc.ServicerContext) -> str:
        """Return the name in the caller's certificate."""
        self.strangers.admit(context.peer())
        (name,) = context.auth_context()["x509_common_name"]
        if not NAME_PATTERN.fullmatch(name.decode()):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the certificate's name is not a valid member name")
        return str(name.decode())

    def join(self, node: str, message: Message) -> Message:
        """Add a node to the swarm (`Coordinator.join`), or only return the run if the message has no capacity."""
        if message["version"] != PROTOCOL_VERSION:
            raise UpdateRejected(f"version: the swarm has protocol {PROTOCOL_VERSION}, this node {message['version']}")
        if "capacity" in message:
            begin = bool(message.get("begin", True))
            self.coordinator.join(node, float(message["capacity"]), str(message["text"]), begin)
        return self.greeting

    def heartbeat(self, node: str, message: Message) -> Message:
        """Record a heartbeat, and return the node's task."""
        return asdict(self.coordinator.heartbeat(node)) | {"problem": self.coordinator.problem}

    def wait(self, node: str, message: Message) -> Message:
        """Wait for a round (`Coordinator.wait`), and return the node's task."""
        seconds = min(WAIT_SECONDS, float(message["seconds"]))
        task = self.coordinator.wait(node, message.get("round"), message.get("committed"), seconds=seconds)
        return asdict(task) | {"problem": self.coordinator.problem}

    def leave(self, node: str, message: Message) -> Message:
        """Remove a node from the swarm."""
        self.coordinator.leave(node, "on request")
        return {}

    def status(self, node: str, message: Message) -> Message:
        """Return the status (`Coordinator.status`)."""
        return self.coordinator.status()

    def text(self, node: str, message: Message) -> Message:
        """Set the text that all nodes must read (`Coordinator.set_text`)."""
        if node != self.operator:
            permitted = f"only the coordinator's certificate, {self.operator}, may set the text"
            raise UpdateRejected(f"{NOT_PERMITTED}: {permitted}")
        self.coordinator.set_text(str(message["text"]))
        return {}

    def received(self, node: str, message: Message) -> Message:
        """Return how many bytes of a node's update were received."""
        partial_path = self.coordinator.store.partial_update_path(int(message["round"]), node, str(message["mark"]))
        return {"bytes": partial_path.stat().st_size if partial_path.exists() else 0}

    def put(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Receive an update: a header, its bytes, and their checksum. The certificate identifies the node."""
        node = self.identify(context)
        round_number = -1
        try:
            with self.rate_limiter.limited(node):
                header = unpack(next(requests))
                round_number = int(header["round"])
                offset = int(header["offset"])
                upload_id = str(header["mark"])
                with self.coordinator.receiving_update(node, round_number, upload_id) as (path, max_bytes):
                    _receive_file(path, offset, max_bytes, size_bytes=int(header["bytes"]), requests=requests)
                    counts = int(header["tokens"]), int(header["steps"])
                    self.coordinator.accept_update(node, round_number, upload_id, *counts)
            return pack({})
        except UpdateRejected as refused:
            reason = str(refused)
        except TensorFileError as error:
            # The damage is in the model, which the node did not send, so the node tries again.
            context.abort(grpc.StatusCode.INTERNAL, f"{DAMAGED}: the coordinator's {error}")
        except (KeyError, TypeError, ValueError, OverflowError, StopIteration) as error:
            reason = f"malformed: {type(error).__name__}: {error}"
        if not reason.startswith(BUSY):
            self.coordinator.record_refusal(node, round_number, reason)
        raise _abort_call(context, reason)

    def get(self, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Send a round's result or, without a round, all weights, piece by piece.

        The node's `local_keys` are excluded. The weights are the present ones, or those of which the node already has a
        part.
        """
        node = self.identify(context)
        try:
            message = unpack(data)
            local_keys = set(message.get("has", ()))
            round_number = int(message.get("round", -1))
            requested_committed = int(message.get("committed", -1))
            with self.rate_limiter.limited(node):
                yield from self._stream_weights(node, round_number, requested_committed, local_keys)
        except UpdateRejected as refused:
            raise _abort_call(context, str(refused)) from None
        except (FileNotFoundError, TensorFileError) as error:
            if round_number >= 0 or requested_committed >= 0:
                context.abort(grpc.StatusCode.NOT_FOUND, "the result of this round was removed: download all weights")
            reason = error.strerror if isinstance(error, FileNotFoundError) else error
            damage = f"a copy of {self.coordinator.store.base} cannot be read: {reason}"
            self.coordinator.problems["weights"] = f"nodes cannot receive all weights: {damage}"
            raise _abort_call(context, f"{DAMAGED}: {damage}") from None
        except (TypeError, ValueError, OverflowError) as error:
            raise _abort_call(context, f"malformed: {type(error).__name__}: {error}") from None

    def _stream_weights(
        self, node: str, round_number: int, requested_committed: int, local_keys: set[str]
    ) -> Iterator[bytes]:
        store = self.coordinator.store
        is_included = round_number >= 0 and self.coordinator.was_included(node, round_number)
        # The node must receive all pieces, because its own differ from the result.
        if round_number >= 0 and not is_included:
            local_keys = set()
        with self.coordinator.changed:
            committed = self.coordinator.state.committed if requested_committed < 0 else requested_committed
            if round_number < 0 and committed == self.coordinator.state.committed:
                store.snapshot(committed)
            path = store.base_of_round(committed) if round_number < 0 else store.broadcast_path(round_number)
        try:
            with TensorFile(path) as file:
                digests = self._verify_digests(file, round_number, committed)
                keys = [key for key in file.shapes if key not in local_keys]
                piece_digests = {key: digests[key] for key in keys}
                yield pack({"committed": committed, "counted": is_included, "pieces": piece_digests})
                yield from tensor_chunks(file, keys)
        except TensorFileError:
            if round_number < 0:
                # The file is a copy, which the next call writes again.
                path.unlink(missing_ok=True)
            raise

    def _verify_digests(self, file: TensorFile, round_number: int, committed: int) -> dict[str, str]:
        """Check that a file is as the coordinator wrote it, and return the digest of each of its tensors."""
        # The digests are computed once for many concurrent calls.
        with self._digest_lock:
            if file.path not in self._digests:
                state = self.coordinator.state
                if round_number >= 0:
                    check_digest(file, file.shapes, state.broadcast_digests.get(round_number))
                else:
                    self.coordinator.store.check_weights(file, state.weight_digests(committed))
                    self.coordinator.problems["weights"] = ""
                recent = [*self._digests.items()][-MAX_CACHED_DIGESTS + 1 :]
                self._digests = dict(recent) | {file.path: {key: file.digest([key]) for key in file.shapes}}
            return self._digests[file.path]


def _receive_file(path: Path, offset: int, max_bytes: int, size_bytes: int, requests: Iterator[bytes]) -> None:
    """Receive the bytes of a file from `offset` on.

    Received bytes remain after a link failure, and the transfer resumes there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    received_bytes = path.stat().st_size if path.exists() else 0
    if offset not in (0, received_bytes):
        raise UpdateRejected(f"malformed: it starts at byte {offset}, after {received_bytes} received bytes")
    if size_bytes > max_bytes:
        raise UpdateRejected(f"oversized: {size_bytes} bytes exceed the maximum of {max_bytes}")
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
                raise UpdateRejected(f"oversized: more than the announced {size_bytes} bytes")
            checksum.update(chunk)
            file.write(chunk)
    if unpack(next(requests))["checksum"] != checksum.hexdigest():
        path.unlink()
        raise UpdateRejected("damaged: its checksum is wrong")
