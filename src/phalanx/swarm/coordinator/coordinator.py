"""Who leads a swarm: takes what nodes tell, closes rounds, and says what came of them. It never calls anybody; the wire
(`wire/server.py`) calls it, from as many threads as there are nodes."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from phalanx.runs.checkpoints import sync
from phalanx.runs.swarm_records import JOURNAL_FILE
from phalanx.spec.run import RunSpec
from phalanx.swarm.aggregation.adamw_step import AdamWStep
from phalanx.swarm.aggregation.aggregate import AggregationConfig
from phalanx.swarm.aggregation.expert_merging import merge_ratio
from phalanx.swarm.aggregation.outer_optimizer import OuterSGD
from phalanx.swarm.coordinator.journal import Journal
from phalanx.swarm.coordinator.ledger import LATE, Event, Ledger, replay, summary
from phalanx.swarm.coordinator.store import SwarmStore
from phalanx.swarm.coordinator.update_checks import BUSY, UpdateRejected, check_update, find_outliers, size_limit
from phalanx.swarm.pieces import round_pieces
from phalanx.swarm.tensor_files import TensorFile
from phalanx.swarm.update_files import Weights, update_base
from phalanx.train.optim.optimizers import learning_rate_factor

NORMS_KEPT = 64
SAID = 200
"""Characters of why something was refused that are kept: some are the sender's."""


def aggregation_config(run: RunSpec, number: int, learned: int = 0) -> AggregationConfig:
    """How a round is put together; experts are merged at its end, if that is its turn. Of the rounds before it so many
    were `learned` in: AdamW counts no others."""
    swarm = run.swarm
    assert swarm is not None
    step, outer = (number + 1) * swarm.steps_per_round, swarm.outer_optimizer
    turn = swarm.merge.every and (number // swarm.fragments + 1) * swarm.every % swarm.merge.every == 0
    ratio = learning_rate_factor(run.optimizer, number, run.training.steps)
    return AggregationConfig(
        codec=swarm.effective_codec,
        outer=OuterSGD(outer.learning_rate, outer.momentum),
        robust=swarm.robust,
        merge_alpha=merge_ratio(step, swarm.merge.alpha, swarm.merge.steps) if turn else 0.0,
        merge_nearest=swarm.merge.nearest,
        descent=AdamWStep(run.optimizer, ratio, learned) if swarm.sends_gradients else None,
    )


@dataclass(frozen=True)
class NodeTask:
    """What a node is to do next."""

    round: int
    """The open one, if it is in it, else the next."""
    committed: int
    """Rounds whose result there is."""
    done: bool
    member: bool
    """Whether the swarm counts on it; not if it was not heard of for too long."""
    first_step: int | None = None
    """Of the text that it reads; None if it is not in the open round."""
    steps: int = 0
    """Of text."""
    owned: tuple[int, ...] = ()
    already_sent: bool = False
    closes_in_seconds: float | None = None

    def reached(self, round: int | None, committed: int | None) -> bool:
        """Whether the node is in a round from this one on, or so many are committed, or the last one is."""
        ready = round is not None and self.first_step is not None and self.round >= round
        return self.done or ready or (committed is not None and self.committed >= committed)


class Coordinator:
    """A swarm's state, its files, and the rounds' clock: `tick` is to be called often."""

    def __init__(self, run: RunSpec, directory: Path, weights: Weights, clock: Callable[[], float] = time.time) -> None:
        """Begins a swarm in the directory from `weights`, or goes on with the one that is there."""
        assert run.swarm is not None
        self.run, self.swarm, self.clock = run, run.swarm, clock
        self.store, self.journal = SwarmStore(directory, run), Journal(directory / JOURNAL_FILE)
        self.ledger: Ledger = replay(run, self.journal.events)
        self.last_heard: dict[str, float] = dict.fromkeys(self.ledger.members, clock())
        """When nodes were last heard of; a coordinator that was away begins to count anew."""
        accepted = [event for event in self.journal.events if event["what"] == "accepted"]
        self.norms: list[float] = [event["norm"] for event in accepted if event["tokens"]]
        self.closing = False
        """Whether the open round is being put together: nothing is told of it any longer."""
        self.ended = False
        """Whether nobody is to wait here any longer."""
        self.changed = threading.Condition()
        """Held while anything here is read or changed; notified when a round opens or closes."""
        self._checking = threading.Lock()
        """Updates are checked one at a time: memory is that of one."""
        self._keeping = ThreadPoolExecutor(1, thread_name_prefix="keeping")
        """The disk has an update when it was checked."""
        self._telling: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        if not self.store.base.exists():
            self.store.initialize(weights, aggregation_config(run, 0))
        if self.ledger.committed:
            last = self.ledger.committed - 1
            self.store.apply_round(last, round_pieces(run, last), aggregation_config(run, last))

    # -- nodes -----------------------------------------------------------------------------------------------------

    def join(self, node: str, capacity: float, text: str, begin: bool = True) -> None:
        """Take a node in, from the next round on; it may have been here before. `capacity` is how many experts of each
        layer it can train, `text` a checksum of what it reads. If it is not to `begin` yet, it only hears whether it
        may, and nobody counts on it.

        Raises Refused for other text than the others', or no capacity.
        """
        with self.changed:
            if not (isfinite(capacity) and capacity >= 1):
                raise UpdateRejected("capacity: it is for less than one expert of each layer")
            capacity = min(int(capacity), self.run.model.moe.num_experts if self.run.model.moe else 1)
            if self.ledger.text not in (None, text) or len(text) > SAID:
                raise UpdateRejected("text: it is not what the other nodes read")
            if not begin:
                self.leave(node, "begins anew")
            else:
                self.last_heard[node] = self.clock()
                self._record({"what": "joined", "node": node, "capacity": capacity, "text": text, "at": self.clock()})

    def leave(self, node: str, why: str) -> None:
        """A node goes."""
        with self.changed:
            if node in self.ledger.members:
                self._record({"what": "left", "node": node, "why": why, "at": self.clock()})

    def heartbeat(self, node: str) -> NodeTask:
        """A node is there; what it is to do."""
        with self.changed:
            self.last_heard[node] = self.clock()
            return self._task(node)

    def wait(self, node: str, round: int | None, committed: int | None, seconds: float) -> NodeTask:
        """What a node is to do, once it has `reached` that; or after so long."""
        deadline = time.monotonic() + seconds
        with self.changed:
            while not (task := self._task(node)).reached(round, committed):
                if (left := deadline - time.monotonic()) <= 0 or self.ended:
                    break
                self.last_heard[node] = self.clock()
                self.changed.wait(left)
            return task

    def _task(self, node: str) -> NodeTask:
        ledger, open_ = self.ledger, self.ledger.round
        if open_ is None or node not in open_.data_assignments:
            following = ledger.committed + (open_ is not None)
            return NodeTask(following, ledger.committed, ledger.done, node in ledger.members)
        closes_at = ledger.closes_at()
        return NodeTask(
            open_.number,
            ledger.committed,
            False,
            node in ledger.members,
            *open_.data_assignments[node],
            ledger.owned(node),
            node in open_.updates,
            None if closes_at is None else closes_at - self.clock(),
        )

    # -- updates ---------------------------------------------------------------------------------------------------

    @contextmanager
    def receiving_update(self, node: str, number: int, mark: str) -> Iterator[tuple[Path, int]]:
        """Around the bytes of a node's update, which it marks: where they go, and how many there may be.

        Raises Refused where the node has nothing to tell, or is telling it already.
        """
        if not self._telling[node].acquire(blocking=False):
            raise UpdateRejected(f"{BUSY}: another update of this node is coming")
        try:
            with self.changed:
                self._check_accepting(node, number)
                limit = size_limit(self.ledger.expected_pieces(node), self.swarm.effective_codec)
                self.store.forget_coming(number, node, mark)
            yield self.store.partial_update_path(number, node, mark), limit
        finally:
            self._telling[node].release()

    def accept_update(self, node: str, number: int, mark: str, tokens: int, steps: int) -> None:
        """Check what came, whole and undamaged, and count it.

        Raises Refused for what does not count.
        """
        path, part = self.store.update(number, node), self.store.partial_update_path(number, node, mark)
        try:
            with self.changed:
                self._check_accepting(node, number)
                items, norms = self.ledger.expected_pieces(node), self.norms[-NORMS_KEPT:]
                _, text = self.ledger.round.data_assignments[node] if self.ledger.round else (0, 0)
            least = 0 if self.swarm.sends_gradients else 1  # of no tokens is one that was not finite
            if not (0 < steps <= text and least <= tokens <= steps * self.run.training.tokens_per_step):
                raise UpdateRejected(f"malformed: {steps} steps of {text}, and tokens that are not of so many")
            kept = self._keeping.submit(sync, part)
            with self._checking, TensorFile(self.store.base) as base:
                since = update_base(self.swarm, base.read)
                norm = check_update(part, items, self.swarm.effective_codec, since, norms, self.swarm.outlier)
            kept.result()
            with self.changed:
                self._check_accepting(node, number)
                size = part.stat().st_size
                part.rename(path)
                sync(path.parent)
                self._record(
                    {
                        "what": "accepted",
                        "round": number,
                        "node": node,
                        "tokens": tokens,
                        "steps": steps,
                        "bytes": size,
                        "norm": norm,
                        "at": self.clock(),
                    }
                )
                self.norms += [norm] if tokens else []
        except UpdateRejected:
            part.unlink(missing_ok=True)
            raise

    def record_refusal(self, node: str, number: int, why: str) -> None:
        """Note that something of a node does not count."""
        kind = why.partition(":")[0]
        with self.changed:
            self._record(
                {"what": "refused", "round": number, "node": node, "why": kind, "said": why[:SAID], "at": self.clock()}
            )

    def _check_accepting(self, node: str, number: int) -> None:
        objection = self.ledger.rejection_reason(node, number)
        if objection is None and self.closing:
            objection = LATE
        if objection is not None:
            raise UpdateRejected(f"{objection}: round {number}")

    # -- rounds ----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Let go of nodes that nobody hears of, close the round if it is time, open the next."""
        now = self.clock()
        with self.changed:
            for node in [node for node, at in self.last_heard.items() if now - at > self.swarm.round.lease_seconds]:
                del self.last_heard[node]
                if node in self.ledger.members:
                    self._record({"what": "left", "node": node, "why": "not heard of", "at": now})
            self.closing = self.ledger.should_close(now)
        if self.closing:
            self._close()
        with self.changed:
            opening = self.ledger.next_round_event(self.clock())
            if opening is not None:
                self._record(opening)
                self.changed.notify_all()

    def _close(self) -> None:
        open_ = self.ledger.round
        assert open_ is not None
        for telling in find_outliers([*open_.updates.values()], self.swarm.outlier):
            said = f"outlying: a change of {telling.norm:.3g}"
            with self.changed:
                self._record(
                    {
                        "what": "dropped",
                        "round": open_.number,
                        "node": telling.node,
                        "why": "outlying",
                        "said": said,
                        "at": self.clock(),
                    }
                )
        number, items = open_.number, round_pieces(self.run, open_.number)
        rules = aggregation_config(self.run, number, self.ledger.learned)
        told = [(telling.node, telling.tokens) for telling in open_.updates.values() if telling.tokens]
        self.store.aggregate_round(number, items, told, rules)
        with self.changed:
            nodes = sorted(node for node, _ in told)
            self._record({"what": "committed", "round": number, "nodes": nodes, "at": self.clock()})
            self.store.apply_round(number, items, rules)
            self.closing = False
            self.changed.notify_all()

    def _record(self, event: Event) -> None:
        """Journal first: what is acted on is not forgotten."""
        self.journal.append(event)
        self.ledger.record(event)

    def was_included(self, node: str, number: int) -> bool:
        """Whether a node's word is in what a round came to; only of the last one is that known."""
        with self.changed:
            return number == self.ledger.committed - 1 and node in self.ledger.last_told

    def shutdown(self) -> None:
        """Let go of all that wait."""
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def status(self) -> dict[str, Any]:
        """For people: see `ledger.summary`."""
        with self.changed:
            return summary(self.ledger, self.last_heard, self.clock())
