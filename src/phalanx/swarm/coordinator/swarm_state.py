"""State of a swarm as a function of its events: members, the open round, its updates and deadline.

The state depends on no clock, file or tensor. The coordinator writes every event to its journal before it acts on it.
After a restart, the same events give the same state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import inf
from typing import Any

from phalanx.spec.errors import UserError
from phalanx.spec.formatting import plural
from phalanx.spec.run import RunSpec
from phalanx.spec.swarm import EXPERT_SPLIT_METHODS
from phalanx.swarm.coordinator.journal import RESTORE
from phalanx.swarm.coordinator.open_round import RECONNECT_SECONDS, AcceptedUpdate, OpenRound
from phalanx.swarm.expert_ownership import Owners, assign_experts, experts_of, rotate_owners
from phalanx.swarm.pieces import ModelPiece, pieces_sent_by, round_pieces

Event = dict[str, Any]
MAX_ARRIVAL_ROUNDS = 5
"""Number of past rounds whose arrival times predict those of the next round."""
ALREADY_SENT = "already sent"
ROUND_CLOSED = "closed"
NOT_OPEN_YET = "not open yet"
NOT_A_MEMBER = "not of this round"
ANOTHER_TEXT = "another text"


class SwarmState:
    """The state of a swarm, which only `record` changes."""

    def __init__(self, run: RunSpec) -> None:
        assert run.swarm is not None
        self.run = run
        self.swarm = run.swarm
        self.members: dict[str, float] = {}
        """Number of experts per layer that each member has memory to train, in the order of joining."""
        self.texts: dict[str, str] = {}
        """Checksum of the text with which each node last joined."""
        self.text: str | None = None
        """Checksum of the text that all nodes read, once one of them has trained or the operator has set it."""
        self.round: OpenRound | None = None
        self.committed = 0
        """Number of committed rounds."""
        self.rounds_with_training = 0
        """Number of these rounds with at least one update."""
        self.owners: Owners | None = None
        self.steps_assigned = 0
        """Number of steps of text that were assigned."""
        self.previous_nodes: frozenset[str] = frozenset()
        """The nodes of the last round."""
        self.last_included_nodes: frozenset[str] = frozenset()
        """The nodes whose updates are in the result of the last round."""
        self.resumed_at = -inf
        """End of the coordinator's last downtime."""
        self.arrivals: list[list[float]] = []
        """Seconds from the opening to the arrival of each update, for the last rounds."""
        self.initial_digests: list[str] = []
        """Digest of the initial weights of each fragment; none in journals of older versions."""
        self.base_digests: dict[int, str] = {}
        """Digest of the weights of a round's fragment after the round."""
        self.broadcast_digests: dict[int, str] = {}
        """Digest of a round's broadcast."""
        self.refused: Counter[tuple[str, str]] = Counter()
        """Number of rejections by node and reason."""

    # -- events ----------------------------------------------------------------------------------------------------

    def can_record(self, event: Event) -> bool:
        """Return whether an event can follow the earlier ones. In a damaged journal it may not."""
        match event["kind"]:
            case "committed":
                return self.round is not None
            case "accepted":
                return self.round is not None and event["node"] in self.round.data_assignments
            case "dropped":
                return self.round is not None and event["node"] in self.round.updates
            case "opened":
                is_next = self.round is None and event["round"] == self.committed
                # Each expert that is distributed over nodes must have owners, which are members.
                is_owned = [bool(nodes) and set(nodes) <= set(self.members) for nodes in event["owners"] or ()]
                has_all_owners = len(is_owned) == self._num_split_experts and all(is_owned)
                return is_next and set(event["text"]) == set(self.members) and has_all_owners
        return True

    def record(self, event: Event) -> None:
        """Apply an event."""
        match event["kind"]:
            case "initialized":
                self.initial_digests = event["base"]
            case "joined":
                self.members[event["node"]] = event["capacity"]
                self.texts[event["node"]] = event["text"]
                # A node that joins again starts over.
                self.previous_nodes -= {event["node"]}
            case "left":
                self.members.pop(event["node"], None)
            case "text":
                self.text = event["text"]
            case "opened":
                owners = event["owners"]
                self.owners = None if owners is None else tuple(map(tuple, owners))
                assignments = {node: (first_step, steps) for node, (first_step, steps) in event["text"].items()}
                self.round = OpenRound(
                    number=event["round"],
                    opened_at=event["at"],
                    owners=self.owners,
                    data_assignments=assignments,
                    num_downtimes=int(event["at"] < self.resumed_at + RECONNECT_SECONDS),
                )
                self.steps_assigned += sum(steps for _, steps in assignments.values())
                self.previous_nodes = frozenset(assignments)
            case "resumed":
                self.resumed_at = event["at"]
                if self.round is not None:
                    self.round.down_seconds += event["down"]
                    self.round.num_downtimes += 1
            case "accepted":
                assert self.round is not None
                fields = {name: event[name] for name in ("node", "tokens", "steps", "bytes", "norm", "at")}
                arrival_seconds = self.round.elapsed_seconds(event["at"])
                self.round.updates[event["node"]] = AcceptedUpdate(**fields, arrival_seconds=arrival_seconds)
                if self.text is None:
                    self.text = self.texts.get(event["node"])
            case "refused":
                self.refused[event["node"], event["reason"]] += 1
                if self.round is not None and event["round"] == self.round.number:
                    self.round.refused.add(event["node"])
            case "dropped":  # an accepted update that later updates show to be an outlier
                assert self.round is not None
                self.refused[event["node"], event["reason"]] += 1
                del self.round.updates[event["node"]]
            case "committed":
                assert self.round is not None
                self.arrivals = [*self.arrivals, self.round.arrival_offsets][-MAX_ARRIVAL_ROUNDS:]
                if "base" in event:
                    self.base_digests[self.round.number] = event["base"]
                    self.broadcast_digests[self.round.number] = event["broadcast"]
                self.rounds_with_training += any(update.tokens for update in self.round.updates.values())
                self.last_included_nodes = frozenset(self.round.updates)
                self.committed, self.round = self.round.number + 1, None

    # -- derived state ---------------------------------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """Number of rounds of the whole run."""
        return self.run.training.steps // self.swarm.steps_per_round

    @property
    def done(self) -> bool:
        """True if the last round is committed."""
        return self.committed >= self.rounds

    def required_text(self, node: str) -> str | None:
        """Return the checksum of the text that a node must have to join, or None if it may have any.

        Before an update was accepted, this is the text of the other members and of the open round.
        """
        holders = [*self.members, *(self.round.data_assignments if self.round is not None else ())]
        return self.text or next((self.texts[holder] for holder in holders if holder != node), None)

    def weight_digests(self, committed: int) -> list[str | None]:
        """Return the digest of each fragment's weights after `committed` rounds; None where none was recorded."""
        num_fragments = self.swarm.fragments
        digests: list[str | None] = [*self.initial_digests] or [None] * num_fragments
        for round_number in range(max(0, committed - num_fragments), committed):
            digests[round_number % num_fragments] = self.base_digests.get(round_number)
        return digests

    def next_round_event(self, now: float) -> Event | None:
        """Return the event that opens the next round with the present members, or None if it cannot open yet."""
        if self.round is not None or self.done or self.waiting_for:
            return None
        assignments = {}
        first_step = self.steps_assigned
        # The first round of a node also has the steps that the node trains during its first exchange.
        for node in self.members:
            steps = self.swarm.steps_per_round + (self.swarm.delay if node not in self.previous_nodes else 0)
            assignments[node] = first_step, steps
            first_step += steps
        owners = self._next_owners()
        return {"kind": "opened", "round": self.committed, "owners": owners, "text": assignments, "at": now}

    @property
    def waiting_for(self) -> str:
        """The condition for which the next round waits, or ""."""
        min_nodes = self.swarm.nodes if self.committed == 0 else 1
        if len(self.members) < min_nodes:
            return plural(min_nodes - len(self.members), "more node", one="one")
        missing = self._num_split_experts - sum(self.members.values())
        return f"memory for {missing:g} more experts of each layer" if missing > 0 else ""

    @property
    def _num_split_experts(self) -> int:
        """Number of experts that are distributed over nodes."""
        moe = self.run.model.moe
        return moe.num_experts if moe is not None and self.swarm.method in EXPERT_SPLIT_METHODS else 0

    def _next_owners(self) -> Owners | None:
        swarm = self.swarm
        if not self._num_split_experts:
            return None
        owners = self.owners
        nodes = list(self.members)
        rotates = swarm.rotate_every and self.committed and self.committed % swarm.rotate_every == 0
        if owners is not None and rotates and set().union(*owners) <= set(nodes):
            owners = rotate_owners(owners, nodes)
        copies = min(swarm.replication, int(sum(self.members.values()) // self._num_split_experts))
        return assign_experts(self._num_split_experts, self.members, copies, previous_owners=owners)

    def expected_pieces(self, node: str) -> tuple[ModelPiece, ...]:
        """Return the pieces that a node must send in the open round."""
        assert self.round is not None
        return pieces_sent_by(round_pieces(self.run, self.round.number), self.round.owners, node)

    def assigned_steps(self, node: str) -> int:
        """Return the number of steps of text that a node may read in the open round."""
        return 0 if self.round is None else self.round.data_assignments[node][1]

    def owned(self, node: str) -> tuple[int, ...]:
        """Return the experts that a node trains in the open round."""
        return () if self.round is None or self.round.owners is None else experts_of(self.round.owners, node)

    def rejection_reason(self, node: str, round_number: int) -> str | None:
        """Return why a node may not send an update of a round, or None if it may."""
        # The node may have missed the answer to its update.
        if round_number < self.committed:
            was_included = round_number == self.committed - 1 and node in self.last_included_nodes
            return ALREADY_SENT if was_included else ROUND_CLOSED
        if self.round is None or round_number > self.round.number:
            return NOT_OPEN_YET
        if node not in self.round.data_assignments:
            return NOT_A_MEMBER
        if self.text not in (None, self.texts[node]):
            return ANOTHER_TEXT
        return ALREADY_SENT if node in self.round.updates else None

    def closes_at(self) -> float | None:
        """Return when the open round stops waiting for missing nodes, or None if that is not determined yet."""
        if self.round is None:
            return None
        round_offsets = self.round.arrival_offsets
        known_offsets = [*round_offsets, *(offset for offsets in self.arrivals for offset in offsets)]
        # All nodes have sent an update, or theirs was rejected.
        all_have_sent = not self._expected_nodes - self.round.updates.keys()
        if all_have_sent:
            return self.round.deadline(known_offsets or [0.0], self.swarm.round)
        has_quorum = len(round_offsets) >= self._quorum_size(len(self.round.data_assignments))
        if not known_offsets or not (self.arrivals or has_quorum):
            return None
        return self.round.deadline(known_offsets, self.swarm.round)

    def should_close(self, now: float) -> bool:
        """Return whether to close the open round: all present nodes have sent, or a quorum has and time is up."""
        if self.round is None:
            return False
        active_nodes = [node for node in self.round.data_assignments if node in self.members]
        updates = self.round.updates
        # This includes a round whose nodes have all left.
        if all(node in updates for node in active_nodes):
            return True
        close_time = self.closes_at()
        quorum = self._quorum_size(len(self._expected_nodes)) if self._expected_nodes else 0
        return len(updates) >= quorum and close_time is not None and now >= close_time

    @property
    def _expected_nodes(self) -> set[str]:
        """The present nodes of the open round that have sent an update, or must still send one.

        Rejected nodes need not."""
        assert self.round is not None
        present = self.round.data_assignments.keys() & self.members.keys()
        return present - (self.round.refused - self.round.updates.keys())

    def _quorum_size(self, nodes: int) -> int:
        return max(1, -int(-nodes * self.swarm.round.quorum // 1))


def replay(run: RunSpec, events: list[Event]) -> SwarmState:
    """Return the state after these events.

    Raises UserError if an event cannot follow the earlier ones: lines of the journal are missing or damaged.
    """
    state = SwarmState(run)
    for number, event in enumerate(events, start=1):
        if not state.can_record(event):
            problem = f"is an event {event['kind']!r} that does not follow from the lines before it"
            raise UserError("journal", f"line {number}", problem, RESTORE)
        state.record(event)
    return state


def summary(state: SwarmState, last_seen: Mapping[str, float], now: float) -> dict[str, Any]:
    """Return the status that `phalanx swarm status` prints."""
    updates = state.round.updates if state.round else {}
    return {
        "method": state.swarm.method,
        "codec": state.swarm.effective_codec,
        "text": state.required_text(""),
        "waits_for": "" if state.round or state.done else state.waiting_for,
        "round": state.committed,
        "rounds": state.rounds,
        "open_seconds": state.round.elapsed_seconds(now) if state.round else None,
        "closes_in_seconds": close_time - now if (close_time := state.closes_at()) is not None else None,
        "nodes": [
            {
                "node": node,
                "experts": list(state.owned(node)),
                "has_update": node in updates,
                "last_seen_seconds": now - last_seen[node] if node in last_seen else None,
                "refused": {
                    reason: count for (rejected_node, reason), count in state.refused.items() if rejected_node == node
                },
            }
            for node in state.members
        ],
        "refused": sum(state.refused.values()),
    }
