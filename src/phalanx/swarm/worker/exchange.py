"""What a node's first rank exchanges with the coordinator, and the files that it does that with: what it tells of a
round, and what came of it, put into the weights that all nodes have.

    base.safetensors     the weights that all nodes have
    live.safetensors     this node's own, when it last told; of ddp their gradients
    update               what it told
    down                 what a round came to"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

from phalanx.cost.exact.parameter_shapes import parameter_shapes
from phalanx.cost.exact.swarm import encoded_bytes
from phalanx.runs.swarm_records import LOCAL_WEIGHTS_FILE, SHARED_WEIGHTS_FILE, RoundRecord
from phalanx.spec.run import RunSpec
from phalanx.spec.swarm import SPLIT
from phalanx.swarm.coordinator.coordinator import NodeTask, aggregation_config
from phalanx.swarm.coordinator.update_checks import UpdateRejected
from phalanx.swarm.expert_ownership import Owners
from phalanx.swarm.pieces import ModelPiece, pieces_sent_by, round_pieces
from phalanx.swarm.rpc.client import RoundExpired, SwarmClient
from phalanx.swarm.tensor_files import TensorFile
from phalanx.swarm.update_files import Feedback, decode_piece, update_base, write_update


class RoundExchange:
    """A node's end of rounds. Every rank knows what it is of and where its files are; the first has the link."""

    def __init__(self, run: RunSpec, directory: Path, name: str, link: SwarmClient | None) -> None:
        assert run.swarm is not None
        self.run, self.swarm, self.directory, self.name, self.link = run, run.swarm, directory, name, link
        self.base, self.local_weights = directory / SHARED_WEIGHTS_FILE, directory / LOCAL_WEIGHTS_FILE
        self.own: tuple[int, ...] = ()
        """The experts that this node trains."""
        self.version = -1
        """Rounds that the base has."""
        self.initial_download_bytes = 0
        """All weights, received before the first round."""
        self.fetched = -1
        """The round of which `down` has what it came to."""
        self.feedback: Feedback = {}
        self.telling_seconds = 0.0
        """The last time."""

    # -- telling -----------------------------------------------------------------------------------------------------

    def send_update(self, task: NodeTask, steps: int, tokens: int, spent: RoundRecord) -> bool:
        """Send what was learned; whether it counted."""
        assert self.link is not None
        begun, before = time.perf_counter(), self.link.sent_bytes
        path, feedback = self.directory / "update", dict(self.feedback)
        with TensorFile(self.local_weights) as live, TensorFile(self.base) as base:
            since = update_base(self.swarm, base.read)
            write_update(
                path, self.pieces_to_send(task.round), self.swarm.effective_codec, live.read, since, feedback
            ).close()
        coded = time.perf_counter()
        try:
            self.link.upload_update(path, task.round, tokens, steps)
            self.feedback = feedback
        except UpdateRejected as refused:
            spent.refused = str(refused)
        self.telling_seconds = time.perf_counter() - begun
        spent.code_seconds += coded - begun
        spent.send_seconds += time.perf_counter() - coded
        spent.sent_bytes += self.link.sent_bytes - before
        return not spent.refused

    def pieces_to_send(self, number: int) -> tuple[ModelPiece, ...]:
        """What this node tells of a round."""
        owners: Owners | None = None
        if self.swarm.method in SPLIT and self.run.model.moe is not None:
            owners = tuple(
                (self.name,) if expert in self.own else () for expert in range(self.run.model.moe.num_experts)
            )
        return pieces_sent_by(round_pieces(self.run, number), owners, self.name)

    # -- hearing -----------------------------------------------------------------------------------------------------

    def local_experts_are_final(self, number: int) -> bool:
        """Whether what this node tells of its experts in a round is what all have of them then."""
        rules = aggregation_config(self.run, number)
        return self._alone and rules.outer.is_plain_mean and not rules.merge_alpha

    def own_experts(self, number: int) -> list[ModelPiece]:
        """Of what it tells of a round, its experts."""
        return [item for item in self.pieces_to_send(number) if item.expert is not None]

    @property
    def _alone(self) -> bool:
        """Whether nobody else trains this node's experts."""
        return self.swarm.method in SPLIT and self.swarm.replication == 1

    def download_model(self) -> int:
        """Receive all weights; returns how many rounds these have."""
        assert self.link is not None
        part, shapes = self.directory / "base.part", parameter_shapes(self.run.model)
        committed = self.link.download_round(part, None, (), shapes.__getitem__)
        part.rename(self.base)
        if not self.local_weights.exists():
            TensorFile.create(self.local_weights, shapes).close()
        return committed

    def prefetch_round(self, number: int, telling: Future[bool], spent: RoundRecord) -> None:
        """Receive what a round comes to once it is known, while the node learns on; nothing, if the node is to leave or
        that is gone already."""
        assert self.link is not None
        told = telling.result()
        while self.link.poll(committed=number + 1) is None:
            if self.link.leaving:
                return
        if self.version == number:
            with suppress(RoundExpired):
                self._get(number, told, spent)

    def catch_up(self, committed: int, spent: RoundRecord, told: int | None) -> int:
        """Bring the base to so many rounds: round by round, or, if one of these is gone, whole. Returns how many it has
        then: if all of it was sent, it may be more."""
        assert self.link is not None
        try:
            if self.version < 0:
                raise RoundExpired
            for number in range(self.version, committed):
                if self.fetched != number:
                    self._get(number, number == told, spent)
                self._apply_round(number, number == told, spent)
        except RoundExpired:
            before = self.link.received_bytes
            with self._receiving(spent):
                committed = self.download_model()
            spent.whole_bytes += self.link.received_bytes - before
            self.feedback.clear()
        return max(self.version, committed)

    @contextmanager
    def _receiving(self, spent: RoundRecord) -> Iterator[None]:
        assert self.link is not None
        before, begun = self.link.received_bytes, time.perf_counter()
        try:
            yield
        finally:
            spent.receive_seconds += time.perf_counter() - begun
            spent.received_bytes += self.link.received_bytes - before

    def _get(self, number: int, told: bool, spent: RoundRecord) -> None:
        """Receive what a round came to."""
        assert self.link is not None
        sizes = {
            item.key: (encoded_bytes(item.numbers, self.swarm.effective_codec),)
            for item in round_pieces(self.run, number)
        }
        with self._receiving(spent):
            self.link.download_round(self.directory / "down", number, self._not_needed(number, told), sizes.__getitem__)
        self.fetched = number

    def _not_needed(self, number: int, told: bool) -> list[str]:
        """What this node has of a round's result already."""
        skips = told and self.swarm.method == "spes+" and self.local_experts_are_final(number)
        return [item.key for item in self.own_experts(number)] if skips else []

    def _apply_round(self, number: int, told: bool, spent: RoundRecord) -> None:
        """Put what a round came to into the base."""
        assert self.link is not None
        begun, path = time.perf_counter(), self.directory / "down"
        own = self._not_needed(number, told) if self.link.counted else []
        with (
            TensorFile(path) as down,
            TensorFile(self.base, writable=True) as base,
            TensorFile(self.directory / "update" if own else path) as mine,
        ):
            for item in round_pieces(self.run, number):
                source = mine if item.key in own else down
                if item.key in source.shapes:
                    base.write(item, decode_piece(item, source.raw(item.key), self.swarm.effective_codec, base.read))
        spent.code_seconds += time.perf_counter() - begun
