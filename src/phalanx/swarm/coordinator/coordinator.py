"""Coordinator of a swarm: receives the nodes' updates, closes rounds and provides their results.

It sends no calls. The RPC server (`rpc/server.py`) calls it from one thread per node.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

from phalanx.runs.checkpoints import sync
from phalanx.runs.swarm_records import JOURNAL_FILE
from phalanx.spec.formatting import printable
from phalanx.spec.run import RunSpec
from phalanx.swarm.aggregation.aggregate import aggregation_config
from phalanx.swarm.coordinator.journal import Journal
from phalanx.swarm.coordinator.node_task import NodeTask, node_task
from phalanx.swarm.coordinator.open_round import steady_clock
from phalanx.swarm.coordinator.store import SwarmStore
from phalanx.swarm.coordinator.swarm_state import ANOTHER_TEXT, ROUND_CLOSED, Event, SwarmState, replay, summary
from phalanx.swarm.coordinator.update_checks import (
    BUSY,
    UpdateRejected,
    check_counts,
    check_update,
    find_outliers,
    size_limit,
)
from phalanx.swarm.pieces import round_pieces
from phalanx.swarm.tensor_files import TensorFile
from phalanx.swarm.update_files import Weights, update_base

MAX_FROZEN_SECONDS = 2.0
"""Maximum time between two ticks, which are due every 0.05 s. After a longer one, the process counts as having been
stopped."""
MAX_RECENT_NORMS = 64
MAX_REASON_CHARS = 200
"""Maximum number of recorded characters of a rejection's reason, which may contain the sender's text."""


class Coordinator:
    """State, files and round clock of a swarm; `tick` must be called often."""

    def __init__(
        self, run: RunSpec, directory: Path, weights: Weights, clock: Callable[[], float] = steady_clock
    ) -> None:
        """Start a swarm, or continue the existing one.

        `weights` are the initial ones of a new swarm. Raises UserError if a file of the model is damaged or missing.
        """
        assert run.swarm is not None
        self.run = run
        self.swarm = run.swarm
        self.clock = clock
        self.store = SwarmStore(directory, run)
        self.journal = Journal(directory / JOURNAL_FILE)
        self.state: SwarmState = replay(run, self.journal.events)
        self.last_heartbeats: dict[str, float] = dict.fromkeys(self.state.members, clock())
        """Times of the last heartbeats; after a restart of the coordinator all of them start now."""
        self.norms: list[float] = [event["norm"] for event in self.journal.events if event.get("tokens")]
        self._is_applied = True
        """False from the commit of a round until its result is in the model."""
        self.closing = False
        """True while the open round is aggregated and accepts no more updates."""
        self.ended = False
        """True once all waiting calls must return."""
        self.changed = threading.Condition()
        """Lock for all state; notified when a round opens or closes."""
        self._check_lock = threading.Lock()
        """Lock that limits the checks to one update at a time, and so their memory."""
        self._store_executor = ThreadPoolExecutor(1, thread_name_prefix="swarm store")
        """Thread that syncs an update to disk while it is checked."""
        self._upload_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self.problems: dict[str, str] = {}
        """Present problems of the swarm by subject, which its operator must solve."""
        self.ticked_at = clock()
        """End of the last tick."""
        if not self.journal.events and not self.store.base.exists():
            self.store.initialize(weights, aggregation_config(run, 0))
        self.store.restore(self.state.weight_digests(self.state.committed), self.state.committed)
        if self.journal.events:
            self._record_event("resumed", down=self.ticked_at - self.journal.last_alive())
        else:
            self._record_event("initialized", base=self.store.base_digests())

    # -- nodes -----------------------------------------------------------------------------------------------------

    def join(self, node: str, capacity: float, data_fingerprint: str, begin: bool = True) -> None:
        """Add a node to the next round; it may have been a member before.

        `capacity` is the number of experts per layer that the node can train, `data_fingerprint` the checksum of its
        text. Unless `begin`, only check that it may join. Raises UpdateRejected if the node may not join.
        """
        with self.changed:
            if not (isfinite(capacity) and capacity >= 1):
                raise UpdateRejected("capacity: it is less than one expert of each layer")
            capacity = min(int(capacity), self.run.model.moe.num_experts if self.run.model.moe else 1)
            required_text = self.state.required_text(node)
            _check_text(data_fingerprint)
            if required_text not in (None, data_fingerprint):
                raise UpdateRejected(f"text: {data_fingerprint} differs from the other nodes' text {required_text}")
            if not begin:
                self.leave(node, "restarts")
            else:
                self.last_heartbeats[node] = self.clock()
                self._record_event("joined", node=node, capacity=capacity, text=data_fingerprint)

    def leave(self, node: str, reason: str) -> None:
        """Remove a node from the swarm."""
        with self.changed:
            if node in self.state.members:
                self._record_event("left", node=node, reason=reason)

    def set_text(self, text: str) -> None:
        """Set the checksum of the text that all nodes must read, and remove members and updates with another text.

        Raises UpdateRejected if the checksum is empty, too long or not printable.
        """
        _check_text(text)
        with self.changed:
            self._record_event("text", text=text)
            updates = self.state.round.updates if self.state.round is not None else ()
            for node in [node for node in updates if self.state.texts[node] != text]:
                self._record_event("dropped", round=self.state.committed, node=node, reason=ANOTHER_TEXT)
            for node in [node for node in self.state.members if self.state.texts[node] != text]:
                self.leave(node, ANOTHER_TEXT)

    def heartbeat(self, node: str) -> NodeTask:
        """Record a heartbeat of a node, and return its task."""
        with self.changed:
            self.last_heartbeats[node] = self.clock()
            return node_task(self.state, node, self.clock(), self.closing)

    def wait(self, node: str, round: int | None, committed: int | None, seconds: float) -> NodeTask:
        """Return a node's task when it has `reached` a round or committed rounds, or after a time."""
        deadline = time.monotonic() + seconds
        with self.changed:
            while True:
                task = node_task(self.state, node, self.clock(), self.closing)
                remaining_seconds = deadline - time.monotonic()
                if task.reached(round, committed) or remaining_seconds <= 0 or self.ended:
                    return task
                self.last_heartbeats[node] = self.clock()
                self.changed.wait(remaining_seconds)

    # -- updates ---------------------------------------------------------------------------------------------------

    @contextmanager
    def receiving_update(self, node: str, round_number: int, upload_id: str) -> Iterator[tuple[Path, int]]:
        """Provide the path and the maximum size for a node's update while it is received.

        Raises UpdateRejected if no update of the node is expected, or another one is being received.
        """
        if not self._upload_locks[node].acquire(blocking=False):
            raise UpdateRejected(f"{BUSY}: another update of this node is in progress")
        try:
            with self.changed:
                self._check_accepting(node, round_number)
                max_bytes = size_limit(self.state.expected_pieces(node), self.swarm.effective_codec)
                self.store.remove_partial_updates(round_number, node, upload_id)
            yield self.store.partial_update_path(round_number, node, upload_id), max_bytes
        finally:
            self._upload_locks[node].release()

    def accept_update(self, node: str, round_number: int, upload_id: str, tokens: int, steps: int) -> None:
        """Check a received update, and accept it.

        `tokens` is the number of targets that the node trained on: its weight in means. Raises UpdateRejected if the
        update is invalid.
        """
        path = self.store.update(round_number, node)
        partial_path = self.store.partial_update_path(round_number, node, upload_id)
        try:
            with self.changed:
                self._check_accepting(node, round_number)
                check_counts(self.run, tokens, steps, assigned_steps=self.state.assigned_steps(node))
                pieces = self.state.expected_pieces(node)
                norms = self.norms[-MAX_RECENT_NORMS:]
            sync_future = self._store_executor.submit(sync, partial_path)
            with self._check_lock, TensorFile(self.store.base) as base:
                codec = self.swarm.effective_codec
                reference = update_base(self.swarm, base.read)
                norm = check_update(partial_path, pieces, codec, reference, norms, self.swarm.outlier)
            sync_future.result()
            with self.changed:
                # The round may have closed during the check.
                self._check_accepting(node, round_number)
                size_bytes = partial_path.stat().st_size
                partial_path.rename(path)
                sync(path.parent)
                update = {"tokens": tokens, "steps": steps, "bytes": size_bytes, "norm": norm}
                self._record_event("accepted", round=round_number, node=node, **update)
                if tokens:
                    self.norms.append(norm)
        except UpdateRejected:
            partial_path.unlink(missing_ok=True)
            raise

    def record_refusal(self, node: str, round_number: int, reason: str) -> None:
        """Record that a message or an update of a node was rejected.

        The round is -1 for an unreadable message. `reason` is the kind of the rejection; more text may follow after a
        colon.
        """
        kind = reason.partition(":")[0]
        with self.changed:
            message = printable(reason[:MAX_REASON_CHARS])
            self._record_event("refused", round=round_number, node=node, reason=kind, message=message)

    def _check_accepting(self, node: str, round_number: int) -> None:
        rejection = self.state.rejection_reason(node, round_number)
        if rejection is None and self.closing:
            rejection = ROUND_CLOSED
        if rejection is not None:
            raise UpdateRejected(f"{rejection}: round {round_number}")

    # -- rounds ----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Remove nodes without heartbeats, close the round if it is time, and open the next one."""
        with self.changed:
            self._apply_committed_round()
            now = self.clock()
            frozen_seconds = now - self.ticked_at
            if frozen_seconds > MAX_FROZEN_SECONDS:
                self.last_heartbeats = {node: at + frozen_seconds for node, at in self.last_heartbeats.items()}
                self._record_event("resumed", down=frozen_seconds)
            lease_seconds = self.swarm.round.lease_seconds
            for node in [node for node, last_seen in self.last_heartbeats.items() if now - last_seen > lease_seconds]:
                del self.last_heartbeats[node]
                if node in self.state.members:
                    self._record_event("left", node=node, reason="no heartbeat")
            self.closing = self.state.should_close(now)
        if self.closing:
            self._close_round()
        with self.changed:
            open_event = self.state.next_round_event(self.clock())
            if open_event is not None:
                self._apply_event(open_event)
                self.changed.notify_all()
        self.journal.mark_alive(now)
        self.ticked_at = self.clock()

    def _close_round(self) -> None:
        open_round = self.state.round
        assert open_round is not None
        with self.changed:
            for update in find_outliers([*open_round.updates.values()], self.swarm.outlier):
                detail = f"outlying: a change of {update.norm:.3g}"
                self._record_event(
                    "dropped", round=open_round.number, node=update.node, reason="outlying", message=detail
                )
            node_tokens = [(update.node, update.tokens) for update in open_round.updates.values() if update.tokens]
        round_number = open_round.number
        pieces = round_pieces(self.run, round_number)
        config = aggregation_config(self.run, round_number, self.state.rounds_with_training)
        digests = self.store.aggregate_round(round_number, pieces, node_tokens, config)
        with self.changed:
            if not open_round.updates.keys() >= {node for node, _ in node_tokens}:
                # An update was dropped meanwhile. The next tick closes the round without it.
                return
            nodes = sorted(node for node, _ in node_tokens)
            self._record_event("committed", round=round_number, nodes=nodes, **digests)
            self._is_applied = False
            self._apply_committed_round()

    def _apply_committed_round(self) -> None:
        """Apply the last committed round; after an error, the next tick tries again before any other event."""
        if not self._is_applied:
            self.store.apply_round(self.state.committed - 1)
            self._is_applied = True
            self.closing = False
            self.changed.notify_all()

    def _record_event(self, kind: str, **fields: Any) -> None:
        """Record an event with the present time."""
        self._apply_event({"kind": kind, **fields, "at": self.clock()})

    def _apply_event(self, event: Event) -> None:
        """Write an event to the journal, then apply it, so that a restart repeats it."""
        self.journal.append(event)
        self.state.record(event)

    def was_included(self, node: str, round_number: int) -> bool:
        """Return whether the result of a round contains a node's update; known only for the last round."""
        with self.changed:
            return round_number == self.state.committed - 1 and node in self.state.last_included_nodes

    @property
    def problem(self) -> str:
        """The present problems of the swarm as a text; "" if there are none."""
        return "; ".join(filter(None, self.problems.values()))

    def shutdown(self) -> None:
        """Release all waiting calls."""
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def status(self) -> dict[str, Any]:
        """Return the status for display (`swarm_state.summary`)."""
        with self.changed:
            return {**summary(self.state, self.last_heartbeats, self.clock()), "problem": self.problem}


def _check_text(text: str) -> None:
    """Raise UpdateRejected if a text cannot be a checksum."""
    if not 0 < len(text) <= MAX_REASON_CHARS or printable(text) != text:
        raise UpdateRejected("text: the checksum is empty, too long or not printable")
