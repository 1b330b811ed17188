"""The coordinator's files: the model as all nodes have it, and what nodes told of a round.

    run.toml  journal.jsonl
    model/base.safetensors      weights; beside it error_feedback, velocity, or exp_avg and exp_avg_sq: see
    `aggregate.ModelState` rounds/000012/NODE.update   what a node told; .part while it comes
    rounds/000012/new-*         what the round came to, until it is in model/
    rounds/000012/down          what nodes are told of it
    rounds/000012/begin.*       the weights that it began with, if a node asked for all

A round's result is written beside the model, journalled, and then put into it: a coordinator that dies in between does
that again."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from phalanx.cost.exact.parameter_shapes import parameter_shapes
from phalanx.cost.exact.swarm import encoded_bytes
from phalanx.runs.checkpoints import sync
from phalanx.runs.swarm_records import SHARED_WEIGHTS_FILE
from phalanx.spec.run import RunSpec
from phalanx.swarm.aggregation.adamw_step import MOMENTS
from phalanx.swarm.aggregation.aggregate import AggregationConfig, ModelState, NodeUpdate, aggregate, encode_broadcast
from phalanx.swarm.pieces import ModelPiece, model_pieces
from phalanx.swarm.tensor_files import TensorFile
from phalanx.swarm.update_files import Weights, sends_weights

MODEL_FILE_KINDS = tuple(field.name for field in fields(ModelState))
MIN_RETAINED_ROUNDS = 2
"""Rounds whose results are kept at least, for nodes that come for them late."""


@dataclass(frozen=True)
class SwarmStore:
    """The files of a swarm in its directory."""

    directory: Path
    run: RunSpec

    @property
    def base(self) -> Path:
        """The weights that every node has."""
        return self.directory / "model" / SHARED_WEIGHTS_FILE

    def round(self, round_number: int) -> Path:
        """The folder of a round."""
        return self.directory / "rounds" / f"{round_number:06d}"

    def update(self, round_number: int, node: str) -> Path:
        """What a node told."""
        return self.round(round_number) / f"{node}.update"

    def partial_update_path(self, round_number: int, node: str, upload_id: str) -> Path:
        """The same while it comes, by its upload id: an update that a node began to send before is another."""
        return self.round(round_number) / f"{node}.{hashlib.sha256(upload_id.encode()).hexdigest()[:16]}.part"

    def remove_partial_updates(self, round_number: int, node: str, upload_id: str) -> None:
        """What the node began to send of the round before this."""
        for path in self.round(round_number).glob(f"{node}.{'[0-9a-f]' * 16}.part"):
            if path != self.partial_update_path(round_number, node, upload_id):
                path.unlink(missing_ok=True)

    def broadcast_path(self, round_number: int) -> Path:
        """What nodes are told."""
        return self.round(round_number) / "down"

    def initialize(self, weights: Weights, config: AggregationConfig) -> None:
        """The model at the start; the last of its files is the weights."""
        self.base.parent.mkdir(parents=True, exist_ok=True)
        shapes = parameter_shapes(self.run.model)
        for kind in self._used_kinds(config)[1:]:
            TensorFile.create(self._model_path(kind), shapes).close()
        partial_path = self.base.with_suffix(".part")
        with TensorFile.create(partial_path, shapes) as file:
            for piece in model_pieces(self.run.model):
                file.write(piece, weights(piece))
            file.sync()
        partial_path.rename(self.base)

    def aggregate_round(
        self,
        round_number: int,
        pieces: Sequence[ModelPiece],
        node_tokens: Iterable[tuple[str, int]],
        config: AggregationConfig,
    ) -> None:
        """Work out a round from what nodes told (their names and tokens). Nothing of the model changes yet."""
        self.round(round_number).mkdir(parents=True, exist_ok=True)
        shapes = parameter_shapes(self.run.model)
        round_shapes = {piece.name: shapes[piece.name] for piece in pieces}
        updates = [
            NodeUpdate(node, tokens, TensorFile(self.update(round_number, node))) for node, tokens in node_tokens
        ]
        old = self._open_state(config, lambda kind: TensorFile(self._model_path(kind)))
        new = self._open_state(config, lambda kind: TensorFile.create(self._new_path(round_number, kind), round_shapes))
        piece_senders = aggregate(pieces, updates, config, old=old, new=new)
        sizes = {
            piece.key: (encoded_bytes(piece.num_elements, config.codec),)
            for piece in pieces
            if piece.key in piece_senders
        }
        partial_path = self.broadcast_path(round_number).with_suffix(".part")
        with TensorFile.create(partial_path, sizes, "U8") as broadcast:
            encode_broadcast(pieces, updates, piece_senders, codec=config.codec, old=old, new=new, broadcast=broadcast)
            broadcast.sync()
        partial_path.rename(self.broadcast_path(round_number))
        for file in new.files.values():
            file.sync()
        sync(self.round(round_number))
        for file in (*(update.file for update in updates), *old.files.values(), *new.files.values()):
            file.close()

    def apply_round(self, round_number: int, pieces: Sequence[ModelPiece], config: AggregationConfig) -> None:
        """Put what a round came to into the model; again, if that was interrupted."""
        for kind in self._used_kinds(config):
            path = self._new_path(round_number, kind)
            if path.exists() and self._is_unfragmented:
                path.replace(self._model_path(kind))
            elif path.exists():
                with TensorFile(path) as new, TensorFile(self._model_path(kind), writable=True) as model:
                    for piece in pieces:
                        model.write(piece, new.read(piece))
                    model.sync()
        for kind in MODEL_FILE_KINDS:
            self._new_path(round_number, kind).unlink(missing_ok=True)
        for pattern in ("*.update", "*.part"):
            for leftover in self.round(round_number).glob(pattern):
                leftover.unlink(missing_ok=True)
        self._remove_old_rounds(round_number)

    def _remove_old_rounds(self, round_number: int) -> None:
        """Remove rounds before this one, but for the last ones as far as their results are together no more than all
        weights: who comes later receives these."""
        retained_bytes = 0
        model_bytes = self.base.stat().st_size
        for round_directory in sorted((self.directory / "rounds").iterdir(), reverse=True):
            broadcast_file = round_directory / "down"
            retained_bytes += broadcast_file.stat().st_size if broadcast_file.exists() else 0
            if retained_bytes > model_bytes and int(round_directory.name) <= round_number - MIN_RETAINED_ROUNDS:
                shutil.rmtree(round_directory, ignore_errors=True)

    def base_of_round(self, round_number: int) -> Path:
        """The weights that a round began with, where there is a `snapshot`."""
        return self.round(round_number) / "begin.safetensors"

    def snapshot(self, committed: int) -> None:
        """Keep the weights after so many rounds, the present ones, as they are."""
        path = self.base_of_round(committed)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial_path = path.with_suffix(".part")
            if self._is_unfragmented:  # each round's model is a file of its own
                partial_path.unlink(missing_ok=True)
                partial_path.hardlink_to(self.base)
            else:
                shutil.copyfile(self.base, partial_path)
                sync(partial_path)
            partial_path.rename(path)

    @property
    def _is_unfragmented(self) -> bool:
        """Whether a round is of the whole model."""
        return self.run.swarm is not None and self.run.swarm.fragments == 1

    def _open_state(self, config: AggregationConfig, open_file: Callable[[str], TensorFile]) -> ModelState:
        return ModelState(**{kind: open_file(kind) for kind in self._used_kinds(config)})

    def _used_kinds(self, config: AggregationConfig) -> list[str]:
        """The files of the model that there are."""
        moments = dict.fromkeys(MOMENTS, config.descent is not None)
        used = {
            "error_feedback": not sends_weights(config.codec),
            "velocity": not config.outer.is_plain_mean,
            **moments,
        }
        return [kind for kind in MODEL_FILE_KINDS if used.get(kind, True)]

    def _model_path(self, kind: str) -> Path:
        return self.base.with_stem(kind)

    def _new_path(self, round_number: int, kind: str) -> Path:
        return self.round(round_number) / f"new-{kind}"
