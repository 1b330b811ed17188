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

from phalanx.runs.jsonl import read_valid_jsonl
from phalanx.runs.problems import Problem

ROUNDS_FILE = "swarm.jsonl"
JOURNAL_FILE = "journal.jsonl"
SWARM_RUN_FILE = "swarm.toml"
LINK_FILE = "link.json"
SHARED_WEIGHTS_FILE = "base.safetensors"
LOCAL_WEIGHTS_FILE = "live.safetensors"


@dataclass(kw_only=True)
class RoundRecord:
    """A round on a node's rank 0. Encoding, sending and receiving may overlap with training."""

    round: int
    steps: int = 0
    tokens: int = 0
    experts: int = 0
    """Number of experts per layer that the node owned and trained."""
    train_seconds: float = 0.0
    code_seconds: float = 0.0
    """Seconds of gathering and encoding weights, and of applying received ones."""
    send_seconds: float = 0.0
    wait_seconds: float = 0.0
    """Seconds of waiting for other nodes."""
    receive_seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    whole_bytes: int = 0
    """Received bytes of full copies of the weights, sent at the start or after too long an absence."""
    held_bytes: int = 0
    """Weights, gradients and optimizer state of rank 0 after its last step, and experts in storage."""
    seconds: float = 0.0
    refused: str = ""


def read_rounds(directory: Path, problems: list[Problem]) -> list[RoundRecord]:
    """Return the rounds of a node in its last swarm; none if it was in no swarm.

    Round numbers start over with each swarm.
    """
    file = directory / ROUNDS_FILE
    names = {field.name for field in fields(RoundRecord)}
    lines = read_valid_jsonl(file, problems, names) if file.is_file() else []
    records = [RoundRecord(**{name: line[name] for name in names}) for line in lines]
    swarm_starts = [index for index in range(1, len(records)) if records[index].round < records[index - 1].round]
    return records[swarm_starts[-1] :] if swarm_starts else records


def format_round(round_record: RoundRecord) -> str:
    """Return a round in a line."""
    megabytes = f"{round_record.sent_bytes / 1e6:.3g} MB up, {round_record.received_bytes / 1e6:.3g} MB down"
    train_share = round_record.train_seconds / round_record.seconds if round_record.seconds else 0.0
    refused = f"; refused: {round_record.refused}" if round_record.refused else ""
    train_text = f"{train_share:.0%} of {round_record.seconds:.3g} s training"
    return f"round {round_record.round}: {round_record.steps} steps, {megabytes}, {train_text}{refused}"
