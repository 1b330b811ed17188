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
from phalanx.swarm.coordinator.ledger import ALREADY
from phalanx.swarm.coordinator.update_checks import BUSY, UpdateRejected
from phalanx.swarm.rpc.protocol import OPTIONS, SERVICE, VERSION, Message, file_chunks, pack, unpack
from phalanx.swarm.tensor_files import TensorFile

PATIENCE_SECONDS = 600.0
"""For which a node tries to reach a coordinator that it has reached before."""
FIRST_SECONDS = 20.0
"""And one that it never has."""
NOTICED_SECONDS = 5.0
"""After which it says so."""
CALL_SECONDS, WAIT_SECONDS = 20.0, 5.0
BROKEN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)
"""What may pass: a link that broke, a coordinator that dies or whose disk is full. All else it means."""
SERVED = "see that phalanx swarm serve runs there"
AUTHORITY = "make both certificates by one authority: phalanx swarm certs"
REASONS = {
    "address lookup failed": ("there is no such host", "mend the address"),
    "CERTIFICATE_VERIFY_FAILED": ("its certificate is of another authority, or has run out", AUTHORITY),
    "certificate required": ("it did not take this node's certificate", AUTHORITY),
    "Hostname": ("its certificate is for another name or address", "make it with phalanx swarm certs --host ADDRESS"),
    "WRONG_VERSION_NUMBER": ("what listens there does not speak TLS", SERVED),
    "Connection refused": ("nobody listens there", SERVED),
}
"""By what gRPC says, why a coordinator cannot be reached, and what to do."""
FOR_GOOD = tuple(REASONS)[:-1]
"""Those that time does not mend."""
T = TypeVar("T")


class RoundExpired(Exception):  # noqa: N818 - not an error: all weights are there instead
    """A round's result that is not kept any more."""


class SwarmClient:
    """A link to a coordinator."""

    def __init__(self, address: str, certificates: Path, say: Callable[[str], None] = lambda said: None) -> None:
        """`say` is told when the coordinator is away, and when it is back."""
        key, own, authority = ((certificates / name).read_bytes() for name in ("key.pem", "cert.pem", "ca.pem"))
        self.address = address
        self._channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(authority, key, own), OPTIONS)
        self._reached, self._say = False, say
        self.leaving = False
        """Whether a coordinator that is away is not to be waited for."""
        self.counted = False
        """Whether this node's word is in what the round that it received last came to."""
        self.place: Message = {}
        """What it joined with: to join again, if it was taken for gone."""
        self.sent_bytes = self.received_bytes = 0
        """Of tensors and their names, since the link was made."""

    def close(self) -> None:
        """Hang up."""
        self._channel.close()

    # -- messages ----------------------------------------------------------------------------------------------------

    def join(self, **message: Any) -> Message:
        """See `server.Calls.join`."""
        return self._ask("join", {"version": VERSION, **message})

    def heartbeat(self) -> NodeTask:
        """Say that it is there; what it is to do."""
        return _task(self._ask("heartbeat", {}))

    def wait(self, round: int | None = None, committed: int | None = None) -> NodeTask:
        """Until it is in a round from this one on, or so many are committed, or the last one is."""
        while (task := self.poll(round, committed)) is None:
            pass
        return task

    def poll(self, round: int | None = None, committed: int | None = None) -> NodeTask | None:
        """The same for half a minute at most: None if it is not so yet. It joins again if it was taken for gone."""
        wanted = {"round": round, "committed": committed, "seconds": WAIT_SECONDS}
        task = _task(self._ask("wait", wanted, WAIT_SECONDS + CALL_SECONDS))
        if not task.member and not task.done and self.place:
            self.join(**self.place)
        return task if task.reached(round, committed) else None

    def leave(self) -> None:
        """Say that it goes."""
        self._ask("leave", {})

    def status(self) -> Message:
        """See `Coordinator.status`. Whoever only asks does not wait for one that is away."""
        self.leaving = True
        return self._ask("status", {})

    def _ask(self, method: str, message: Message, seconds: float = CALL_SECONDS) -> Message:
        call = self._channel.unary_unary(f"/{SERVICE}/{method}")
        return unpack(self._tried(lambda: call(pack(message), timeout=seconds)))

    # -- tensors -----------------------------------------------------------------------------------------------------

    def upload_update(self, path: Path, round: int, tokens: int, steps: int) -> None:
        """Send an update. Raises Refused where it does not count."""
        size, mark = path.stat().st_size, update_id(path)
        call, tries = self._channel.stream_unary(f"/{SERVICE}/put"), 0

        def send() -> None:
            nonlocal tries
            tries += 1
            here = int(self._ask("received", {"round": round, "mark": mark})["bytes"])
            head = {"round": round, "offset": here, "bytes": size, "mark": mark, "tokens": tokens, "steps": steps}

            def parts() -> Iterator[bytes]:
                yield pack(head)
                seen = xxhash.xxh3_128()
                with path.open("rb") as file:
                    for chunk in file_chunks(file):
                        seen.update(chunk)
                        new = chunk[max(0, here - (file.tell() - len(chunk))) :]
                        self.sent_bytes += len(new)
                        if new:
                            yield new
                yield pack({"checksum": seen.hexdigest()})

            call(parts())

        try:
            self._tried(send)
        except UpdateRejected as refused:
            if tries == 1 or not str(refused).startswith(ALREADY):  # else its answer was lost with the link
                raise

    def download_round(
        self, path: Path, round: int | None, own: Sequence[str], shapes: Callable[[str], tuple[int, ...]]
    ) -> int:
        """Receive what a round came to, but for the node's own pieces, into a file; or all weights. Returns how many
        rounds are committed. `shapes` are those of pieces by name. Where the link breaks it goes on with the next one.

        Raises Gone if that is not kept any more, and Refused for what did not arrive as it was sent.
        """
        call, committed = self._channel.unary_stream(f"/{SERVICE}/get"), -1
        done: set[str] = set()

        def receive() -> None:
            nonlocal committed
            message: Message = {"has": [*own, *done]}
            if round is not None:
                message["round"] = round
            elif done:
                message["committed"] = committed
            stream = iter(call(pack(message)))
            head = unpack(next(stream))
            self.counted = bool(head["counted"])
            if not done:
                kind, committed = "F32" if round is None else "U8", int(head["committed"])
                TensorFile.recreate(path, {key: shapes(key) for key in head["pieces"]}, kind).close()
            with TensorFile(path, writable=True) as file:
                left = memoryview(b"")
                for key, digest in head["pieces"].items():
                    left = self._into(file, key, digest, stream, left)
                    done.add(key)

        while True:
            try:
                self._tried(receive)
                return committed
            except RoundExpired:  # all weights are kept for a while only; the present ones are there
                if round is not None:
                    raise
                done.clear()

    def _into(self, file: TensorFile, key: str, digest: str, stream: Iterator[bytes], left: memoryview) -> memoryview:
        """Take a tensor from a stream, after what was `left` of it; returns what is then."""
        place, size = file.place(key)
        seen, end = xxhash.xxh3_128(), place + size
        while place < end:
            if not left:
                left = memoryview(next(stream, b""))
                self.received_bytes += len(left)
            if not left:
                raise UpdateRejected(f"damaged: {key} is cut off")
            part, left = left[: end - place], left[end - place :]
            seen.update(part)
            file.write_at(place, part)
            place += len(part)
        if seen.hexdigest() != digest:
            raise UpdateRejected(f"damaged: the checksum of {key} is another")
        return left

    def _tried(self, call: Callable[[], T]) -> T:
        """Again while the link is broken.

        Raises UserError if that takes too long, Refused and Gone for what the coordinator says.
        """
        begun, pause, moved, noticed = time.monotonic(), 0.1, -1, False
        while True:
            try:
                result = call()
                self._reached = True
                if noticed:
                    self._say("the coordinator is back")
                return result
            except grpc.RpcError as error:
                code, said = error.code(), error.details() or ""
                if code == grpc.StatusCode.NOT_FOUND:
                    raise RoundExpired(said) from None
                if code not in BROKEN and not said.startswith(BUSY):
                    raise UpdateRejected(said) from None
                if self.sent_bytes + self.received_bytes != moved:  # it goes on, if slowly
                    begun, moved = time.monotonic(), self.sent_bytes + self.received_bytes
                away, patience = time.monotonic() - begun, PATIENCE_SECONDS if self._reached else FIRST_SECONDS
                for_good = not self._reached and any(word in said for word in FOR_GOOD)
                if away > patience or for_good or (self.leaving and away > 1):
                    raise _unreachable(self.address, said) from None
                if self._reached and not noticed and away > NOTICED_SECONDS:
                    noticed = True
                    self._say(f"the coordinator is away; trying again for {PATIENCE_SECONDS:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, 5.0)


def update_id(path: Path) -> str:
    """Tells an update from those that the node wrote before."""
    return str(path.stat().st_mtime_ns)


def _task(message: Message) -> NodeTask:
    return NodeTask(**{**message, "owned": tuple(message["owned"])})


def _unreachable(address: str, said: str) -> UserError:
    """What keeps a coordinator from being reached, as far as TLS and the network say."""
    why, fix = next((reason for word, reason in REASONS.items() if word in said), (said or "no answer", SERVED))
    return UserError("ADDRESS", address, f"cannot be reached: {why}", fix)
