"""A node's end of the wire. It dials out, and again when the link breaks, and goes on where a transfer stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc
import xxhash

from phalanx.spec.errors import UserError
from phalanx.swarm.coordinator.coordinator import NodeTask
from phalanx.swarm.coordinator.swarm_state import ALREADY_SENT
from phalanx.swarm.coordinator.update_checks import BUSY, UpdateRejected
from phalanx.swarm.rpc.protocol import OPTIONS, PROTOCOL_VERSION, SERVICE, Message, file_chunks, pack, unpack
from phalanx.swarm.tensor_files import TensorFile

RECONNECT_SECONDS = 600.0
"""For which a node tries to reach a coordinator that it has reached before."""
FIRST_CONNECT_SECONDS = 20.0
"""And one that it never has."""
WARN_AFTER_SECONDS = 5.0
"""After which it says so."""
CALL_SECONDS = 20.0
WAIT_SECONDS = 5.0
RETRYABLE_CODES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)
"""What may pass: a link that broke, a coordinator that dies or whose disk is full. All else it means."""
SERVE_FIX = "see that phalanx swarm serve runs there"
AUTHORITY_FIX = "make both certificates by one authority: phalanx swarm certs"
UNREACHABLE_REASONS = {
    "address lookup failed": ("there is no such host", "mend the address"),
    "CERTIFICATE_VERIFY_FAILED": ("its certificate is of another authority, or has run out", AUTHORITY_FIX),
    "certificate required": ("it did not take this node's certificate", AUTHORITY_FIX),
    "Hostname": ("its certificate is for another name or address", "make it with phalanx swarm certs --host ADDRESS"),
    "WRONG_VERSION_NUMBER": ("what listens there does not speak TLS", SERVE_FIX),
    "Connection refused": ("nobody listens there", SERVE_FIX),
}
"""By what gRPC says, why a coordinator cannot be reached, and what to do."""
PERMANENT_PHRASES = tuple(UNREACHABLE_REASONS)[:-1]
"""Those that time does not mend."""
T = TypeVar("T")


class RoundExpired(Exception):  # noqa: N818 - not an error: all weights are there instead
    """A round's result that is not kept any more."""


class SwarmClient:
    """A link to a coordinator."""

    def __init__(self, address: str, certificates: Path, log: Callable[[str], None] = lambda message: None) -> None:
        """`log` is called when the coordinator is away, and when it is back."""
        key, certificate, authority = ((certificates / name).read_bytes() for name in ("key.pem", "cert.pem", "ca.pem"))
        self.address = address
        self._channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(authority, key, certificate), OPTIONS)
        self._reached = False
        self._say = log
        self.leaving = False
        """Whether a coordinator that is away is not to be waited for."""
        self.was_included = False
        """Whether this node's word is in what the round that it received last came to."""
        self.join_message: Message = {}
        """What it joined with: to join again, if it was taken for gone."""
        self.sent_bytes = self.received_bytes = 0
        """Of tensors and their names, since the link was made."""

    def close(self) -> None:
        """Hang up."""
        self._channel.close()

    # -- messages ----------------------------------------------------------------------------------------------------

    def join(self, **message: Any) -> Message:
        """See `server.py`."""
        return self._call("join", {"version": PROTOCOL_VERSION, **message})

    def heartbeat(self) -> NodeTask:
        """Say that it is there; what it is to do."""
        return _parse_task(self._call("heartbeat", {}))

    def wait(self, round: int | None = None, committed: int | None = None) -> NodeTask:
        """Until it is in a round from this one on, or so many are committed, or the last one is."""
        while (task := self.poll(round, committed)) is None:
            pass
        return task

    def poll(self, round: int | None = None, committed: int | None = None) -> NodeTask | None:
        """The same for half a minute at most: None if it is not so yet. It joins again if it was taken for gone."""
        request = {"round": round, "committed": committed, "seconds": WAIT_SECONDS}
        task = _parse_task(self._call("wait", request, WAIT_SECONDS + CALL_SECONDS))
        if not task.member and not task.done and self.join_message:
            self.join(**self.join_message)
        return task if task.reached(round, committed) else None

    def leave(self) -> None:
        """Say that it goes."""
        self._call("leave", {})

    def status(self) -> Message:
        """See `Coordinator.status`. Whoever only asks does not wait for one that is away."""
        self.leaving = True
        return self._call("status", {})

    def _call(self, method: str, message: Message, seconds: float = CALL_SECONDS) -> Message:
        call = self._channel.unary_unary(f"/{SERVICE}/{method}")
        return unpack(self._retry(lambda: call(pack(message), timeout=seconds)))

    # -- tensors -----------------------------------------------------------------------------------------------------

    def upload_update(self, path: Path, round: int, tokens: int, steps: int) -> None:
        """Send an update. Raises UpdateRejected where it does not count."""
        size_bytes = path.stat().st_size
        upload_id = update_id(path)
        call = self._channel.stream_unary(f"/{SERVICE}/put")
        tries = 0

        def send_file() -> None:
            nonlocal tries
            tries += 1
            offset = int(self._call("received", {"round": round, "mark": upload_id})["bytes"])
            header = {
                "round": round,
                "offset": offset,
                "bytes": size_bytes,
                "mark": upload_id,
                "tokens": tokens,
                "steps": steps,
            }

            def parts() -> Iterator[bytes]:
                yield pack(header)
                checksum = xxhash.xxh3_128()
                with path.open("rb") as file:
                    for chunk in file_chunks(file):
                        checksum.update(chunk)
                        unsent = chunk[max(0, offset - (file.tell() - len(chunk))) :]
                        self.sent_bytes += len(unsent)
                        if unsent:
                            yield unsent
                yield pack({"checksum": checksum.hexdigest()})

            call(parts())

        try:
            self._retry(send_file)
        except UpdateRejected as refused:
            if tries == 1 or not str(refused).startswith(ALREADY_SENT):  # else its answer was lost with the link
                raise

    def download_round(
        self, path: Path, round: int | None, local_keys: Sequence[str], shapes: Callable[[str], tuple[int, ...]]
    ) -> int:
        """Receive what a round came to, but for the node's own pieces, into a file; or all weights. Returns how many
        rounds are committed. `shapes` are those of pieces by name. Where the link breaks it goes on with the next one.

        Raises RoundExpired if that is not kept any more, and UpdateRejected for what did not arrive as it was sent.
        """
        call = self._channel.unary_stream(f"/{SERVICE}/get")
        committed = -1
        received_keys: set[str] = set()

        def receive_pieces() -> None:
            nonlocal committed
            message: Message = {"has": [*local_keys, *received_keys]}
            if round is not None:
                message["round"] = round
            elif received_keys:
                message["committed"] = committed
            stream = iter(call(pack(message)))
            header = unpack(next(stream))
            self.was_included = bool(header["counted"])
            if not received_keys:
                dtype = "F32" if round is None else "U8"
                committed = int(header["committed"])
                TensorFile.recreate(path, {key: shapes(key) for key in header["pieces"]}, dtype).close()
            with TensorFile(path, writable=True) as file:
                buffer = memoryview(b"")
                for key, digest in header["pieces"].items():
                    buffer = self._receive_tensor(file, key, digest, stream=stream, buffer=buffer)
                    received_keys.add(key)

        while True:
            try:
                self._retry(receive_pieces)
                return committed
            except RoundExpired:  # all weights are kept for a while only; the present ones are there
                if round is not None:
                    raise
                received_keys.clear()

    def _receive_tensor(
        self, file: TensorFile, key: str, digest: str, stream: Iterator[bytes], buffer: memoryview
    ) -> memoryview:
        """Take a tensor from `buffer`, then from the stream; return the bytes that are left over."""
        offset, size = file.locate(key)
        checksum = xxhash.xxh3_128()
        end = offset + size
        while offset < end:
            if not buffer:
                buffer = memoryview(next(stream, b""))
                self.received_bytes += len(buffer)
            if not buffer:
                raise UpdateRejected(f"damaged: {key} is cut off")
            chunk, buffer = buffer[: end - offset], buffer[end - offset :]
            checksum.update(chunk)
            file.write_at(offset, chunk)
            offset += len(chunk)
        if checksum.hexdigest() != digest:
            raise UpdateRejected(f"damaged: the checksum of {key} is another")
        return buffer

    def _retry(self, call: Callable[[], T]) -> T:
        """Again while the link is broken.

        Raises UserError if that takes too long, Refused and Gone for what the coordinator says.
        """
        start = time.monotonic()
        pause = 0.1
        moved_bytes = -1
        has_warned = False
        while True:
            try:
                result = call()
                self._reached = True
                if has_warned:
                    self._say("the coordinator is back")
                return result
            except grpc.RpcError as error:
                code = error.code()
                details = error.details() or ""
                if code == grpc.StatusCode.NOT_FOUND:
                    raise RoundExpired(details) from None
                if code not in RETRYABLE_CODES and not details.startswith(BUSY):
                    raise UpdateRejected(details) from None
                if self.sent_bytes + self.received_bytes != moved_bytes:  # it goes on, if slowly
                    start = time.monotonic()
                    moved_bytes = self.sent_bytes + self.received_bytes
                away_seconds = time.monotonic() - start
                patience = RECONNECT_SECONDS if self._reached else FIRST_CONNECT_SECONDS
                is_permanent = not self._reached and any(phrase in details for phrase in PERMANENT_PHRASES)
                if away_seconds > patience or is_permanent or (self.leaving and away_seconds > 1):
                    raise _unreachable_error(self.address, details) from None
                if self._reached and not has_warned and away_seconds > WARN_AFTER_SECONDS:
                    has_warned = True
                    self._say(f"the coordinator is away; trying again for {RECONNECT_SECONDS:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, 5.0)


def update_id(path: Path) -> str:
    """Tells an update from those that the node wrote before."""
    return str(path.stat().st_mtime_ns)


def _parse_task(message: Message) -> NodeTask:
    return NodeTask(**{**message, "owned": tuple(message["owned"])})


def _unreachable_error(address: str, details: str) -> UserError:
    """What keeps a coordinator from being reached, as far as TLS and the network say."""
    problem, fix = next(
        (reason for phrase, reason in UNREACHABLE_REASONS.items() if phrase in details),
        (details or "no answer", SERVE_FIX),
    )
    return UserError("ADDRESS", address, f"cannot be reached: {problem}", fix=fix)
