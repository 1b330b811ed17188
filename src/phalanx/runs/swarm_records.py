"""Records of the rounds of a swarm.

nodes/NAME/swarm.jsonl      a node: bytes, seconds and memory of each round (`RoundRecord`)
nodes/NAME/swarm.toml       the run as the coordinator sent it
nodes/NAME/link.json        the addresses of the coordinator and of the certificates
nodes/NAME/base.safetensors, live.safetensors     the shared weights, and the weights of this node
RUN_DIR/journal.jsonl       the coordinator: every event (`swarm/coordinator/swarm_state.py`); marks such a directory
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from phalanx.runs.decode import (
    Amount,
    Count,
    Decode,
    Number,
    accept_old_keys,
    decode_object,
    decoder,
    read_json,
    union_decoder,
)
from phalanx.runs.jsonl import read_valid_jsonl
from phalanx.spec.errors import UserError

ROUNDS_FILE = "swarm.jsonl"
JOURNAL_FILE = "journal.jsonl"
SWARM_RUN_FILE = "swarm.toml"
LINK_FILE = "link.json"
SHARED_WEIGHTS_FILE = "base.safetensors"
LOCAL_WEIGHTS_FILE = "live.safetensors"


@dataclass(kw_only=True)
class RoundRecord:
    """A round on a node's rank 0. Encoding, sending and receiving may overlap with training."""

    round: Count
    steps: Count = 0
    tokens: Count = 0
    """Number of targets that the node trained on, which is its weight in means."""
    experts: Count = 0
    """Number of experts per layer that the node owned and trained."""
    train_seconds: Amount = 0.0
    code_seconds: Amount = 0.0
    """Seconds of gathering and encoding weights, and of applying received ones."""
    send_seconds: Amount = 0.0
    wait_seconds: Amount = 0.0
    """Seconds of waiting for other nodes."""
    receive_seconds: Amount = 0.0
    sent_bytes: Count = 0
    received_bytes: Count = 0
    initial_bytes: Count = 0
    """Received bytes of full copies of the weights, sent at the start or after too long an absence."""
    held_bytes: Count = 0
    """Weights, gradients and optimizer state of rank 0 after its last step, and experts in storage."""
    seconds: Amount = 0.0
    refused: str = ""


_decode_fields: Decode[RoundRecord] = decoder(RoundRecord)


def _decode_round(content: bytes) -> RoundRecord:
    if not decode_object(content).keys() >= {field.name for field in fields(RoundRecord)}:
        raise ValueError("a field is missing")
    return _decode_fields(content)


decode_round = accept_old_keys(_decode_round, {"whole_bytes": "initial_bytes"})
"""Decode a line of `ROUNDS_FILE`, which has all fields unless another version wrote it."""


class JoinMessage(TypedDict):
    """The message with which a node joins."""

    capacity: Amount
    """Number of experts per layer that the node can train."""
    text: str
    """Checksum of the node's text."""


class LinkRecord(TypedDict):
    """A node's link to its coordinator."""

    address: str
    certificates: str
    node: str
    place: JoinMessage
    version: Count
    """Number of rounds that the received weights include."""
    received_bytes: Count


_decode_link: Decode[LinkRecord] = decoder(LinkRecord)


def read_link(directory: Path) -> LinkRecord:
    """Return the link of a node's directory. Raises UserError if the file is missing or damaged."""
    file = directory / LINK_FILE
    try:
        return read_json(file, _decode_link)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged"
        fix = "join again with phalanx swarm join"
        raise UserError(
            "node directory", str(directory), f"has a {LINK_FILE} that cannot be read: {reason}", fix=fix
        ) from None


@with_config(ConfigDict(extra="allow"))
class JournalEvent(TypedDict):
    """An event of a swarm's coordinator (`swarm/coordinator/swarm_state.py`)."""

    kind: str
    at: Number


class RoundEvent(JournalEvent):
    """An event that may be of a round, such as its end."""

    round: NotRequired[Count]


class JoinedEvent(JournalEvent):
    """A node has joined."""

    node: str
    capacity: Amount
    text: str
    """Checksum of the node's text."""


class LeftEvent(JournalEvent):
    """A node has left."""

    node: str


class OpenedEvent(JournalEvent):
    """A round was opened."""

    round: Count
    owners: list[list[str]] | None
    """The nodes that train each expert."""
    text: dict[str, tuple[Count, Count]]
    """First step and number of steps of the text of each node."""


class AcceptedEvent(RoundEvent):
    """A node's update was accepted."""

    node: str
    tokens: Count
    steps: Count
    bytes: Count
    norm: Number


class InitializedEvent(JournalEvent):
    """The initial weights were written."""

    base: list[str]
    """Digests of the weights."""


class TextEvent(JournalEvent):
    """The text that all nodes read was set."""

    text: str
    """Checksum of the text."""


class ResumedEvent(RoundEvent):
    """A coordinator continues the open round after a restart."""

    down: Number
    """Seconds in which no coordinator ran."""


class CommittedEvent(RoundEvent):
    """The result of a round is in the model."""

    base: NotRequired[str]
    """Digest of the weights after the round."""
    broadcast: NotRequired[str]
    """Digest of the round's broadcast."""


class RefusedEvent(JournalEvent):
    """A node's update was rejected, or an accepted one was dropped."""

    node: str
    round: int
    """The round that the node named; -1 if its message was unreadable."""
    reason: str


EVENT_TYPES: dict[str, Any] = {
    "initialized": InitializedEvent,
    "joined": JoinedEvent,
    "left": LeftEvent,
    "text": TextEvent,
    "opened": OpenedEvent,
    "resumed": ResumedEvent,
    "accepted": AcceptedEvent,
    "refused": RefusedEvent,
    "dropped": RefusedEvent,
    "committed": CommittedEvent,
}
decode_journal_event = accept_old_keys(
    union_decoder("kind", EVENT_TYPES, RoundEvent), {"what": "kind", "why": "reason", "said": "message"}
)
"""Decode a line of a coordinator's journal, of which another version may have written other events."""


def read_rounds(directory: Path, problems: list[str]) -> list[RoundRecord]:
    """Return the rounds of a node in its last swarm; none if it was in no swarm.

    Round numbers start over with each swarm.
    """
    file = directory / ROUNDS_FILE
    records = read_valid_jsonl(file, problems, decode_round) if file.exists() or file.is_symlink() else []
    swarm_starts = [index for index in range(1, len(records)) if records[index].round < records[index - 1].round]
    return records[swarm_starts[-1] :] if swarm_starts else records


def format_round(round_record: RoundRecord) -> str:
    """Return a round in a line."""
    megabytes = f"{round_record.sent_bytes / 1e6:.3g} MB up, {round_record.received_bytes / 1e6:.3g} MB down"
    train_share = round_record.train_seconds / round_record.seconds if round_record.seconds else 0.0
    refused = f"; refused: {round_record.refused}" if round_record.refused else ""
    train_text = f"{train_share:.0%} of {round_record.seconds:.3g} s training"
    return f"round {round_record.round}: {round_record.steps} steps, {megabytes}, {train_text}{refused}"
