"""Exchange of a node's first rank with the coordinator: updates, and results for the shared weights.

base.safetensors     the weights that all nodes have
live.safetensors     this node's weights at its last update; for ddp its gradients
update               the last update
down                 the broadcast of a round
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

from phalanx.cost.exact.swarm import encoded_bytes
from phalanx.parallel.expert.partial_experts import TrainedExperts
from phalanx.runs.swarm_records import LOCAL_WEIGHTS_FILE, SHARED_WEIGHTS_FILE, RoundRecord
from phalanx.spec.parameter_shapes import parameter_shapes
from phalanx.spec.run import RunSpec
from phalanx.spec.swarm import EXPERT_SPLIT_METHODS
from phalanx.swarm.aggregation.aggregate import aggregation_config
from phalanx.swarm.coordinator.node_task import NodeTask
from phalanx.swarm.coordinator.update_checks import UpdateRejected
from phalanx.swarm.expert_ownership import Owners
from phalanx.swarm.pieces import ModelPiece, pieces_sent_by, round_pieces
from phalanx.swarm.rpc.client import RoundExpired, SwarmClient
from phalanx.swarm.tensor_files import TensorFile
from phalanx.swarm.update_files import Feedback, decode_piece, update_base, write_update


class RoundExchange:
    """The rounds of a node. Every rank knows their contents and files, but only the first rank has the link."""

    def __init__(self, run: RunSpec, directory: Path, name: str, link: SwarmClient | None) -> None:
        assert run.swarm is not None
        self.run = run
        self.swarm = run.swarm
        self.directory = directory
        self.name = name
        self.link = link
        self.base = directory / SHARED_WEIGHTS_FILE
        self.local_weights = directory / LOCAL_WEIGHTS_FILE
        self.local_experts: tuple[int, ...] = ()
        """The experts that this node trains."""
        self.version = -1
        """Number of rounds that the shared weights include."""
        self.initial_download_bytes = 0
        """Number of bytes of the weights received before the first round."""
        self.fetched_round = -1
        """The round whose broadcast is in the file `down`."""
        self.feedback: Feedback = {}
        self.upload_seconds = 0.0
        """Seconds of encoding and sending the last update, while the coordinator was reachable."""

    # -- sending -----------------------------------------------------------------------------------------------------

    def send_update(self, task: NodeTask, steps: int, tokens: int, round_record: RoundRecord) -> bool:
        """Send the update of a round, and return whether the coordinator accepted it.

        `tokens` is the number of targets that the node trained on. The record of the round is updated.
        """
        assert self.link is not None
        start = time.perf_counter()
        sent_before = self.link.sent_bytes
        path = self.directory / "update"
        feedback = dict(self.feedback)
        with TensorFile(self.local_weights) as local_file, TensorFile(self.base) as base:
            codec = self.swarm.effective_codec
            reference = update_base(self.swarm, base.read)
            write_update(path, self.pieces_to_send(task.round), codec, local_file.read, reference, feedback).close()
        encoded_at = time.perf_counter()
        try:
            self.link.upload_update(path, task.round, tokens, steps)
            self.feedback = feedback
        except UpdateRejected as refused:
            round_record.refused = str(refused)
        self.upload_seconds = encoded_at - start + self.link.upload_seconds
        round_record.code_seconds += encoded_at - start
        round_record.send_seconds += time.perf_counter() - encoded_at
        round_record.sent_bytes += self.link.sent_bytes - sent_before
        return not round_record.refused

    def pieces_to_send(self, round_number: int) -> tuple[ModelPiece, ...]:
        """Return the pieces that this node sends in a round."""
        owners: Owners | None = None
        if self.swarm.method in EXPERT_SPLIT_METHODS and self.run.model.moe is not None:
            experts = range(self.run.model.moe.num_experts)
            owners = tuple((self.name,) if expert in self.local_experts else () for expert in experts)
        return pieces_sent_by(round_pieces(self.run, round_number), owners, self.name)

    # -- receiving ---------------------------------------------------------------------------------------------------

    def local_experts_are_final(self, round_number: int) -> bool:
        """Return whether the result of a round contains this node's experts as this node sends them."""
        config = aggregation_config(self.run, round_number)
        trains_experts_alone = self.swarm.method in EXPERT_SPLIT_METHODS and self.swarm.replication == 1
        return trains_experts_alone and config.outer.is_plain_mean and not config.merge_alpha

    def local_expert_pieces(self, round_number: int) -> list[ModelPiece]:
        """Return the expert pieces that this node sends in a round."""
        return [piece for piece in self.pieces_to_send(round_number) if piece.expert is not None]

    def reset_expert_feedback(self, round_number: int) -> None:
        """Forget the encoding errors of the experts that this node sent in a round."""
        for piece in self.local_expert_pieces(round_number):
            self.feedback.pop(piece.key, None)

    @property
    def trained_experts(self) -> TrainedExperts | None:
        """The experts that this node trains; None if nodes train all."""
        if self.swarm.method not in EXPERT_SPLIT_METHODS:
            return None
        return TrainedExperts(self.local_experts, self.swarm.frozen_expert_codec)

    def download_model(self) -> int:
        """Receive all weights, and return how many rounds they include."""
        assert self.link is not None
        partial_path = self.directory / "base.part"
        shapes = parameter_shapes(self.run.model)
        committed = self.link.download_round(partial_path, None, (), shapes.__getitem__)
        partial_path.rename(self.base)
        if not self.local_weights.exists():
            TensorFile.create(self.local_weights, shapes).close()
        return committed

    def prefetch_round(self, round_number: int, upload: Future[bool], round_record: RoundRecord) -> None:
        """Receive the result of a round when it is known, while the node continues training.

        No result is received if the node must leave, or if the result was removed. `upload` is that of this node's
        update. The record of the round is updated.
        """
        assert self.link is not None
        was_accepted = upload.result()
        while self.link.poll(committed=round_number + 1) is None:
            if self.link.leaving:
                return
        if self.version == round_number:
            with suppress(RoundExpired):
                self._download_round(round_number, was_accepted, round_record)

    def catch_up(self, committed: int, round_record: RoundRecord, accepted_round: int | None) -> int:
        """Update the shared weights to `committed` rounds, and return how many rounds they include.

        The results are received round by round. If one was removed, all weights are received, which may include more
        rounds. `accepted_round` is the last one in which this node's update was accepted.
        """
        assert self.link is not None
        try:
            if self.version < 0:
                raise RoundExpired
            for round_number in range(self.version, committed):
                was_accepted = round_number == accepted_round
                if self.fetched_round != round_number:
                    self._download_round(round_number, was_accepted, round_record)
                self._apply_round(round_number, was_accepted, round_record)
        except RoundExpired:
            received_before = self.link.received_bytes
            with self._measure_download(round_record):
                committed = self.download_model()
            round_record.initial_bytes += self.link.received_bytes - received_before
            self.feedback.clear()
        return max(self.version, committed)

    @contextmanager
    def _measure_download(self, round_record: RoundRecord) -> Iterator[None]:
        assert self.link is not None
        received_before = self.link.received_bytes
        start = time.perf_counter()
        try:
            yield
        finally:
            round_record.receive_seconds += time.perf_counter() - start
            round_record.received_bytes += self.link.received_bytes - received_before

    def _download_round(self, round_number: int, was_accepted: bool, round_record: RoundRecord) -> None:
        """Receive the broadcast of a round."""
        assert self.link is not None
        codec = self.swarm.effective_codec
        pieces = round_pieces(self.run, round_number)
        sizes = {piece.key: (encoded_bytes(piece.num_elements, codec),) for piece in pieces}
        with self._measure_download(round_record):
            skipped_keys = self._skipped_keys(round_number, was_accepted)
            self.link.download_round(self.directory / "down", round_number, skipped_keys, sizes.__getitem__)
        self.fetched_round = round_number

    def _skipped_keys(self, round_number: int, was_accepted: bool) -> list[str]:
        """Return the keys of a round's result that this node already has."""
        if self.swarm.method != "spes+" or not was_accepted or not self.local_experts_are_final(round_number):
            return []
        return [piece.key for piece in self.local_expert_pieces(round_number)]

    def _apply_round(self, round_number: int, was_accepted: bool, round_record: RoundRecord) -> None:
        """Apply a round's broadcast to the shared weights, and what it skips from the node's own update."""
        assert self.link is not None
        start = time.perf_counter()
        pieces = round_pieces(self.run, round_number)
        local_keys = self._skipped_keys(round_number, was_accepted) if self.link.was_included else []
        self._apply_pieces(self.directory / "down", [piece for piece in pieces if piece.key not in local_keys])
        if local_keys:
            self._apply_pieces(self.directory / "update", [piece for piece in pieces if piece.key in local_keys])
        round_record.code_seconds += time.perf_counter() - start

    def _apply_pieces(self, path: Path, pieces: list[ModelPiece]) -> None:
        """Apply those of these pieces that a file of encoded pieces contains to the shared weights."""
        with TensorFile(path) as encoded, TensorFile(self.base, writable=True) as base:
            for piece in pieces:
                if piece.key in encoded.shapes:
                    data = encoded.raw(piece.key)
                    base.write(piece, decode_piece(piece, data, self.swarm.effective_codec, base=base.read))
