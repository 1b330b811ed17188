"""Client of a node: connects to the coordinator, reconnects after failures, and resumes transfers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc
import xxhash

from phalanx.swarm.coordinator.node_task import NodeTask
from phalanx.swarm.coordinator.swarm_state import ALREADY_SENT
from phalanx.swarm.coordinator.update_checks import BUSY, UpdateRejected
from phalanx.swarm.rpc.link_errors import PERMANENT_PHRASES, unreachable_error
from phalanx.swarm.rpc.protocol import OPTIONS, PROTOCOL_VERSION, SERVICE, Message, file_chunks, pack, unpack
from phalanx.swarm.tensor_files import TensorFile

logger = logging.getLogger(__name__)

RECONNECT_SECONDS = 600.0
"""Time limit for reconnecting to a coordinator."""
FIRST_CONNECT_SECONDS = 20.0
"""Time limit for the first connection."""
WARN_AFTER_SECONDS = 5.0
"""Time after which the node reports that the coordinator is unreachable."""
CALL_SECONDS = 20.0
WAIT_SECONDS = 5.0
RETRYABLE_CODES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)
"""Errors that may be temporary: a failed link, or a coordinator that crashed or has a full disk."""
T = TypeVar("T")


class RoundExpired(Exception):  # noqa: N818 - not an error: all weights are available instead
    """The result of a round that was removed."""


class SwarmClient:
    """A connection to a coordinator."""

    def __init__(self, address: str, certificates: Path) -> None:
        """Open a connection; it logs when the coordinator is unreachable or reachable again."""
        key, certificate, authority = ((certificates / name).read_bytes() for name in ("key.pem", "cert.pem", "ca.pem"))
        self.address = address
        self._channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(authority, key, certificate), OPTIONS)
        self._reached = False
        self._reported_problem = ""
        self.leaving = False
        """True if the node does not wait for an unreachable coordinator."""
        self.was_included = False
        """True if the last received round contains this node's update."""
        self.join_message: Message = {}
        """The message with which the node joined, to join again if its lease has expired."""
        self.sent_bytes = self.received_bytes = 0
        """Number of bytes of tensors and their names that were sent and received since the connection was opened."""
        self.upload_seconds = 0.0
        """Duration of the last upload's last attempt, without waiting for the coordinator to return."""

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    # -- messages ----------------------------------------------------------------------------------------------------

    def join(self, **message: Any) -> Message:
        """Join the swarm (`SwarmService.join`), and return the coordinator's answer."""
        return self._call_coordinator("join", {"version": PROTOCOL_VERSION, **message})

    def heartbeat(self) -> NodeTask:
        """Send a heartbeat, and return the node's task."""
        return self._parse_task(self._call_coordinator("heartbeat", {}))

    def wait(self, round: int | None = None, committed: int | None = None) -> NodeTask:
        """Wait until the node is in round `round` or later, `committed` rounds are done, or all rounds are."""
        task = None
        while task is None:
            task = self.poll(round, committed)
        return task

    def poll(self, round: int | None = None, committed: int | None = None) -> NodeTask | None:
        """Wait as `wait` does for `WAIT_SECONDS`, and return None if the condition is not met yet.

        A node whose lease has expired joins again.
        """
        request = {"round": round, "committed": committed, "seconds": WAIT_SECONDS}
        task = self._parse_task(self._call_coordinator("wait", request, WAIT_SECONDS + CALL_SECONDS))
        if not task.member and not task.done and self.join_message:
            self.join(**self.join_message)
        return task if task.reached(round, committed) else None

    def _parse_task(self, message: Message) -> NodeTask:
        """Return a task, and report a new problem of the coordinator, for which the node may wait."""
        task = NodeTask(**{**message, "owned": tuple(message["owned"])})
        if task.problem and task.problem != self._reported_problem:
            logger.warning("the coordinator has a problem: %s", task.problem)
        self._reported_problem = task.problem
        return task

    def leave(self) -> None:
        """Leave the swarm."""
        self._call_coordinator("leave", {})

    def status(self) -> Message:
        """Return the status (`Coordinator.status`) without waiting for an unreachable coordinator."""
        self.leaving = True
        return self._call_coordinator("status", {})

    def _call_coordinator(self, method: str, message: Message, seconds: float = CALL_SECONDS) -> Message:
        call = self._channel.unary_unary(f"/{SERVICE}/{method}")
        return unpack(self._retry(lambda: call(pack(message), timeout=seconds)))

    # -- tensors -----------------------------------------------------------------------------------------------------

    def set_text(self, text: str) -> None:
        """Set the checksum of the text that all nodes must read, with the certificate of the coordinator."""
        self._call_coordinator("text", {"text": text})

    def upload_update(self, path: Path, round: int, tokens: int, steps: int) -> None:
        """Send an update.

        `tokens` is the number of targets that the node trained on. Raises UpdateRejected if the coordinator rejected
        the update.
        """
        size_bytes = path.stat().st_size
        upload_id = update_id(path)
        call = self._channel.stream_unary(f"/{SERVICE}/put")
        tries = 0
        start = time.perf_counter()

        def send_file() -> None:
            nonlocal tries, start
            tries += 1
            offset = int(self._call_coordinator("received", {"round": round, "mark": upload_id})["bytes"])
            start = time.perf_counter()
            sizes = {"offset": offset, "bytes": size_bytes}
            header = {"round": round, **sizes, "mark": upload_id, "tokens": tokens, "steps": steps}

            def iter_chunks() -> Iterator[bytes]:
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

            call(iter_chunks())

        try:
            self._retry(send_file)
        except UpdateRejected as refused:
            # A second attempt is rejected if the first arrived, and only its answer was lost with the link.
            if tries == 1 or not str(refused).startswith(ALREADY_SENT):
                raise
        finally:
            self.upload_seconds = time.perf_counter() - start

    def download_round(
        self, path: Path, round: int | None, local_keys: Sequence[str], shapes: Callable[[str], tuple[int, ...]]
    ) -> int:
        """Receive a round's broadcast or all weights into a file, and return the number of committed rounds.

        After a link failure, the transfer continues with the next piece. Without `round`, receive all weights.
        `local_keys` are the pieces that the node already has. Raises RoundExpired if the coordinator has removed the
        result of the round. Raises UpdateRejected if the data was damaged in transfer.
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
                    buffer = self._receive_tensor(file, key, digest, stream, buffer)
                    received_keys.add(key)

        while True:
            try:
                self._retry(receive_pieces)
                return committed
            except RoundExpired as expired:
                # Older weights are kept for a limited time, the present ones always.
                if round is not None:
                    raise
                if not received_keys:
                    raise UpdateRejected(f"no weights: {expired}") from None
                received_keys.clear()

    def _receive_tensor(
        self, file: TensorFile, key: str, digest: str, stream: Iterator[bytes], buffer: memoryview
    ) -> memoryview:
        """Read a tensor from `buffer`, then from the stream, and return the remaining bytes."""
        offset, size = file.locate(key)
        checksum = xxhash.xxh3_128()
        end = offset + size
        while offset < end:
            if not buffer:
                buffer = memoryview(next(stream, b""))
                self.received_bytes += len(buffer)
            if not buffer:
                raise UpdateRejected(f"damaged: {key} is truncated")
            chunk = buffer[: end - offset]
            buffer = buffer[len(chunk) :]
            checksum.update(chunk)
            file.write_at(offset, chunk)
            offset += len(chunk)
        if checksum.hexdigest() != digest:
            raise UpdateRejected(f"damaged: the checksum of {key} is wrong")
        return buffer

    def _retry(self, call: Callable[[], T]) -> T:
        """Call a function, and repeat the call while the link is broken.

        Raises UserError if the coordinator is unreachable for too long. Raises UpdateRejected if the coordinator
        rejected the call. Raises RoundExpired if the coordinator has removed the result of the round.
        """
        last_progress_at = time.monotonic()
        pause = 0.1
        moved_bytes = -1
        has_warned = False
        while True:
            try:
                result = call()
                self._reached = True
                if has_warned:
                    logger.info("the coordinator is reachable again")
                return result
            except grpc.RpcError as error:
                details = error.details() or ""
                if error.code() == grpc.StatusCode.NOT_FOUND:
                    raise RoundExpired(details) from None
                if error.code() not in RETRYABLE_CODES and not details.startswith(BUSY):
                    raise UpdateRejected(details) from None
                # Otherwise the link failed, or the coordinator was busy.
            # A slow link makes progress too.
            if self.sent_bytes + self.received_bytes != moved_bytes:
                last_progress_at = time.monotonic()
                moved_bytes = self.sent_bytes + self.received_bytes
            unreachable_seconds = time.monotonic() - last_progress_at
            if self._gives_up(unreachable_seconds, details):
                raise unreachable_error(self.address, details)
            if self._reached and not has_warned and unreachable_seconds > WARN_AFTER_SECONDS:
                has_warned = True
                logger.warning("the coordinator is unreachable; retrying for %.0f s", RECONNECT_SECONDS)
            time.sleep(pause)
            pause = min(2 * pause, 5.0)

    def _gives_up(self, unreachable_seconds: float, details: str) -> bool:
        """Return whether the link has been broken for too long, or cannot recover."""
        if self.leaving and unreachable_seconds > 1:
            return True
        if self._reached:
            return unreachable_seconds > RECONNECT_SECONDS
        return unreachable_seconds > FIRST_CONNECT_SECONDS or any(phrase in details for phrase in PERMANENT_PHRASES)


def update_id(path: Path) -> str:
    """Return an id that differs between the updates of a node."""
    return str(path.stat().st_mtime_ns)
