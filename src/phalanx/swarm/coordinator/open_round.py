"""The open round of a swarm: its updates, and its clock, which stops while the coordinator is down."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median

from phalanx.spec.swarm import RoundSpec
from phalanx.swarm.expert_ownership import Owners

RECONNECT_SECONDS = 10.0
"""Time for nodes to notice that the coordinator is back: twice the longest pause between their attempts."""

CLOCK_OFFSET = time.time() - time.monotonic()


def steady_clock() -> float:
    """Return the time of day at the start of this process plus the time since then, which nobody adjusts."""
    return CLOCK_OFFSET + time.monotonic()


@dataclass(frozen=True, kw_only=True)
class AcceptedUpdate:
    """An accepted update of a node."""

    node: str
    tokens: int
    steps: int
    bytes: int
    norm: float
    """Norm of the change in the update."""
    at: float
    arrival_seconds: float
    """Seconds from the round's opening to its arrival, without downtime of the coordinator."""


@dataclass(kw_only=True)
class OpenRound:
    """The open round."""

    number: int
    opened_at: float
    owners: Owners | None
    data_assignments: dict[str, tuple[int, int]]
    """First step and number of steps of the text of each node, without overlap."""
    updates: dict[str, AcceptedUpdate] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    """Nodes with a rejected update; they may send another."""
    down_seconds: float = 0.0
    """Seconds since the opening in which the coordinator was down."""
    num_downtimes: int = 0
    """Number of downtimes after which nodes had to reconnect, including one just before the opening."""

    def elapsed_seconds(self, now: float) -> float:
        """Return the seconds since the opening, without downtime of the coordinator."""
        return now - self.opened_at - self.down_seconds

    @property
    def arrival_offsets(self) -> list[float]:
        """Seconds from the opening to the arrival of each update."""
        return [update.arrival_seconds for update in self.updates.values()]

    def deadline(self, known_offsets: list[float], spec: RoundSpec) -> float:
        """Return when the round stops waiting for missing nodes, given arrivals in this and earlier rounds."""
        down_seconds = self.down_seconds + self.num_downtimes * RECONNECT_SECONDS
        return self.opened_at + down_seconds + deadline_offset(known_offsets, spec)


def deadline_offset(offsets: list[float], spec: RoundSpec) -> float:
    """Return the seconds after a round's opening at which it stops waiting for missing nodes.

    They are the median of the arrival times plus the maximum of three terms: a multiple of their median deviation
    (robust to one late node), the grace time, and a quarter of the median.
    """
    median_offset = median(offsets)
    deviation = median(abs(offset - median_offset) for offset in offsets)
    return median_offset + max(spec.timeout_multiplier * deviation, spec.grace_seconds, median_offset / 4)
