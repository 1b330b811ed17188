"""Files of the coordinator: the model that all nodes have, and the updates of a round.

    run.toml  journal.jsonl     next to the journal: alive, when the coordinator last ran (`journal.Journal`)
    model/base.safetensors      weights; next to it error_feedback, velocity, or exp_avg and exp_avg_sq
                                (`aggregate.ModelState`)
    rounds/000012/NODE.update   a node's update; .part while it is received
    rounds/000012/new-*         the round's new state, until it is in model/
    rounds/000012/down          the round's broadcast
    rounds/000012/begin.*       the initial weights of the round, if a node requested all weights

A round's result is written next to the model, recorded in the journal, and then moved into the model. A coordinator
that exits in between repeats the move.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path

from phalanx.cost.exact.swarm import encoded_bytes
from phalanx.runs.checkpoints import sync
from phalanx.runs.swarm_records import SHARED_WEIGHTS_FILE
from phalanx.spec.errors import UserError
from phalanx.spec.parameter_shapes import parameter_shapes
from phalanx.spec.run import RunSpec
from phalanx.swarm.aggregation.adamw_step import MOMENTS
from phalanx.swarm.aggregation.aggregate import (
    AggregationConfig,
    ModelState,
    NodeUpdate,
    aggregate,
    aggregation_config,
    encode_broadcast,
)
from phalanx.swarm.pieces import ModelPiece, fragment_pieces, model_pieces, round_pieces
from phalanx.swarm.tensor_files import TensorFile, TensorFileError
from phalanx.swarm.update_files import Weights, sends_weights

MODEL_FILE_KINDS = tuple(field.name for field in fields(ModelState))
MIN_RETAINED_ROUNDS = 2
"""Minimum number of rounds whose results are kept for late nodes."""


@dataclass(frozen=True)
class SwarmStore:
    """The files in a swarm's directory."""

    directory: Path
    run: RunSpec

    @property
    def base(self) -> Path:
        """The weights that every node has."""
        return self.directory / "model" / SHARED_WEIGHTS_FILE

    def round(self, round_number: int) -> Path:
        """Return the folder of a round."""
        return self.directory / "rounds" / f"{round_number:06d}"

    def update(self, round_number: int, node: str) -> Path:
        """Return the path of a node's update."""
        return self.round(round_number) / f"{node}.update"

    def partial_update_path(self, round_number: int, node: str, upload_id: str) -> Path:
        """Return the path of a partially received update, which differs between uploads."""
        return self.round(round_number) / f"{node}.{hashlib.sha256(upload_id.encode()).hexdigest()[:16]}.part"

    def remove_partial_updates(self, round_number: int, node: str, upload_id: str) -> None:
        """Remove partial updates of a node with another id."""
        for path in self.round(round_number).glob(f"{node}.{'[0-9a-f]' * 16}.part"):
            if path != self.partial_update_path(round_number, node, upload_id):
                path.unlink(missing_ok=True)

    def broadcast_path(self, round_number: int) -> Path:
        """Return the path of a round's broadcast."""
        return self.round(round_number) / "down"

    def initialize(self, weights: Weights, config: AggregationConfig) -> None:
        """Write the initial model; the weights are its last file."""
        self.base.parent.mkdir(parents=True, exist_ok=True)
        shapes = parameter_shapes(self.run.model)
        for kind in self._used_file_kinds(config)[1:]:
            TensorFile.create(self._model_path(kind), shapes).close()
        partial_path = self.base.with_suffix(".part")
        with TensorFile.create(partial_path, shapes) as file:
            for piece in model_pieces(self.run.model):
                file.write(piece, weights(piece))
            file.sync()
        partial_path.rename(self.base)

    def base_digests(self) -> list[str]:
        """Return the digest of the present weights of each fragment."""
        with TensorFile(self.base) as base:
            return [base.digest(names) for names in self._fragment_names]

    def restore(self, digests: Sequence[str | None], committed: int) -> None:
        """Repeat the application of the last round, which may have been interrupted, and check the model's files.

        The digest of a fragment's weights is None if it was not recorded. Raises UserError if a file is missing, or is
        not as it was written.
        """
        last_round = max(0, committed - 1)
        config = aggregation_config(self.run, last_round)
        shapes = parameter_shapes(self.run.model)
        try:
            if committed:
                self.apply_round(last_round)
            for kind in self._used_file_kinds(config):
                with TensorFile(self._model_path(kind)) as file:
                    if file.shapes != shapes:
                        raise TensorFileError(f"{file.path.name} has tensors of another model")
                    if kind == "base":
                        self.check_weights(file, digests)
        except (OSError, TensorFileError) as error:
            fix = f"restore the file from a copy; nodes/NAME/{SHARED_WEIGHTS_FILE} of a node in the last round is one"
            raise UserError("model", str(self.base.parent), f"is damaged: {error}", fix) from None

    def check_weights(self, file: TensorFile, digests: Sequence[str | None]) -> None:
        """Check all weights in a file.

        The digest of a fragment is None if it was not recorded. Raises TensorFileError if the weights differ from what
        was written.
        """
        for names, digest in zip(self._fragment_names, digests, strict=True):
            check_digest(file, names, digest)

    @property
    def _fragment_names(self) -> list[list[str]]:
        """The names of the tensors of each fragment."""
        assert self.run.swarm is not None
        num_fragments = self.run.swarm.fragments
        fragments = (fragment_pieces(self.run.model, fragment, num_fragments) for fragment in range(num_fragments))
        return [[*dict.fromkeys(piece.name for piece in pieces)] for pieces in fragments]

    def aggregate_round(
        self,
        round_number: int,
        pieces: Sequence[ModelPiece],
        node_tokens: Iterable[tuple[str, int]],
        config: AggregationConfig,
    ) -> dict[str, str]:
        """Aggregate a round without changing the model yet, and return the digests of its weights and broadcast.

        `node_tokens` lists the name and the number of tokens of each node that sent an update.
        """
        self.round(round_number).mkdir(parents=True, exist_ok=True)
        shapes = parameter_shapes(self.run.model)
        round_shapes = {piece.name: shapes[piece.name] for piece in pieces}
        # The files are closed even if the disk is full, because the round is then tried again.
        with ExitStack() as files:
            updates = [
                NodeUpdate(node, tokens, files.enter_context(TensorFile(self.update(round_number, node))))
                for node, tokens in node_tokens
            ]
            old_files = {}
            new_files = {}
            for kind in self._used_file_kinds(config):
                old_files[kind] = files.enter_context(TensorFile(self._model_path(kind)))
                new_file = TensorFile.create(self._new_path(round_number, kind), round_shapes)
                new_files[kind] = files.enter_context(new_file)
            old = ModelState(**old_files)
            new = ModelState(**new_files)
            piece_senders = aggregate(pieces, updates, config, old, new)
            sent_pieces = [piece for piece in pieces if piece.key in piece_senders]
            sizes = {piece.key: (encoded_bytes(piece.num_elements, config.codec),) for piece in sent_pieces}
            partial_path = self.broadcast_path(round_number).with_suffix(".part")
            broadcast = files.enter_context(TensorFile.create(partial_path, sizes, "U8"))
            encode_broadcast(pieces, updates, piece_senders, config.codec, old, new, broadcast)
            for file in (broadcast, *new.files.values()):
                file.sync()
            partial_path.rename(self.broadcast_path(round_number))
            sync(self.round(round_number))
            return {"base": new.base.digest(round_shapes), "broadcast": broadcast.digest(broadcast.shapes)}

    def apply_round(self, round_number: int) -> None:
        """Apply a round's result to the model; an interrupted call can be repeated."""
        for kind in self._used_file_kinds(aggregation_config(self.run, round_number)):
            path = self._new_path(round_number, kind)
            if path.exists() and self._is_unfragmented:
                path.replace(self._model_path(kind))
            elif path.exists():
                with TensorFile(path) as new, TensorFile(self._model_path(kind), writable=True) as model:
                    for piece in round_pieces(self.run, round_number):
                        model.write(piece, new.read(piece))
                    model.sync()
        for kind in MODEL_FILE_KINDS:
            self._new_path(round_number, kind).unlink(missing_ok=True)
        for pattern in ("*.update", "*.part"):
            for leftover in self.round(round_number).glob(pattern):
                leftover.unlink(missing_ok=True)
        # Keep the last rounds while their results together are smaller than the weights, which a late node receives
        # otherwise.
        retained_bytes = 0
        model_bytes = self.base.stat().st_size
        for round_directory in sorted((self.directory / "rounds").iterdir(), reverse=True):
            broadcast_file = round_directory / "down"
            retained_bytes += broadcast_file.stat().st_size if broadcast_file.exists() else 0
            if retained_bytes > model_bytes and int(round_directory.name) <= round_number - MIN_RETAINED_ROUNDS:
                shutil.rmtree(round_directory, ignore_errors=True)

    def base_of_round(self, round_number: int) -> Path:
        """Return the path of a round's initial weights, which `snapshot` writes."""
        return self.round(round_number) / "begin.safetensors"

    def snapshot(self, committed: int) -> None:
        """Save the present weights, those after `committed` rounds."""
        path = self.base_of_round(committed)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial_path = path.with_suffix(".part")
            # Without fragments, each round writes a new file of the model.
            if self._is_unfragmented:
                partial_path.unlink(missing_ok=True)
                partial_path.hardlink_to(self.base)
            else:
                shutil.copyfile(self.base, partial_path)
                sync(partial_path)
            partial_path.rename(path)

    @property
    def _is_unfragmented(self) -> bool:
        """True if a round covers the full model."""
        return self.run.swarm is not None and self.run.swarm.fragments == 1

    def _used_file_kinds(self, config: AggregationConfig) -> list[str]:
        """Return the kinds of files that the model has."""
        used = dict.fromkeys(MOMENTS, config.descent is not None)
        used |= {"error_feedback": not sends_weights(config.codec), "velocity": not config.outer.is_plain_mean}
        return [kind for kind in MODEL_FILE_KINDS if used.get(kind, True)]

    def _model_path(self, kind: str) -> Path:
        return self.base.with_stem(kind)

    def _new_path(self, round_number: int, kind: str) -> Path:
        return self.round(round_number) / f"new-{kind}"


def check_digest(file: TensorFile, names: Iterable[str], digest: str | None) -> None:
    """Check the content of tensors.

    The digest is None if it was not recorded. Raises TensorFileError if the content differs from what was written.
    """
    if digest is not None and file.digest(names) != digest:
        raise TensorFileError(f"{file.path.name} differs from what the coordinator wrote")
