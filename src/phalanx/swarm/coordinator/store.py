"""The coordinator's files: the model as all nodes have it, and what nodes told of a round.

    run.toml  journal.jsonl
    model/base.safetensors      weights; beside it left, velocity, or exp_avg and exp_avg_sq: see `aggregate.ModelState`
    rounds/000012/NODE.update   what a node told; .part while it comes
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

KINDS = tuple(field.name for field in fields(ModelState))
KEPT = 2
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

    def round(self, number: int) -> Path:
        """The folder of a round."""
        return self.directory / "rounds" / f"{number:06d}"

    def update(self, number: int, node: str) -> Path:
        """What a node told."""
        return self.round(number) / f"{node}.update"

    def partial_update_path(self, number: int, node: str, mark: str) -> Path:
        """The same while it comes, by its mark: an update that a node began to send before is another."""
        return self.round(number) / f"{node}.{hashlib.sha256(mark.encode()).hexdigest()[:16]}.part"

    def forget_coming(self, number: int, node: str, mark: str) -> None:
        """What the node began to send of the round before this."""
        for path in self.round(number).glob(f"{node}.{'[0-9a-f]' * 16}.part"):
            if path != self.partial_update_path(number, node, mark):
                path.unlink(missing_ok=True)

    def broadcast_path(self, number: int) -> Path:
        """What nodes are told."""
        return self.round(number) / "down"

    def initialize(self, weights: Weights, rules: AggregationConfig) -> None:
        """The model at the start; the last of its files is the weights."""
        self.base.parent.mkdir(parents=True, exist_ok=True)
        shapes = parameter_shapes(self.run.model)
        for kind in self._kinds(rules)[1:]:
            TensorFile.create(self._model(kind), shapes).close()
        part = self.base.with_suffix(".part")
        with TensorFile.create(part, shapes) as file:
            for item in model_pieces(self.run.model):
                file.write(item, weights(item))
            file.sync()
        part.rename(self.base)

    def aggregate_round(
        self, number: int, items: Sequence[ModelPiece], told: Iterable[tuple[str, int]], rules: AggregationConfig
    ) -> None:
        """Work out a round from what nodes told (their names and tokens). Nothing of the model changes yet."""
        self.round(number).mkdir(parents=True, exist_ok=True)
        shapes = parameter_shapes(self.run.model)
        mine = {item.name: shapes[item.name] for item in items}
        updates = [NodeUpdate(node, tokens, TensorFile(self.update(number, node))) for node, tokens in told]
        old = self._state(rules, lambda kind: TensorFile(self._model(kind)))
        new = self._state(rules, lambda kind: TensorFile.create(self._new(number, kind), mine))
        stands = aggregate(items, updates, rules, old, new)
        sizes = {item.key: (encoded_bytes(item.numbers, rules.codec),) for item in items if item.key in stands}
        part = self.broadcast_path(number).with_suffix(".part")
        with TensorFile.create(part, sizes, "U8") as down:
            encode_broadcast(items, updates, stands, rules.codec, old, new, down)
            down.sync()
        part.rename(self.broadcast_path(number))
        for file in new.files.values():
            file.sync()
        sync(self.round(number))
        for file in (*(update.file for update in updates), *old.files.values(), *new.files.values()):
            file.close()

    def apply_round(self, number: int, items: Sequence[ModelPiece], rules: AggregationConfig) -> None:
        """Put what a round came to into the model; again, if that was interrupted."""
        for kind in self._kinds(rules):
            path = self._new(number, kind)
            if path.exists() and self._one_fragment:
                path.replace(self._model(kind))
            elif path.exists():
                with TensorFile(path) as new, TensorFile(self._model(kind), writable=True) as model:
                    for item in items:
                        model.write(item, new.read(item))
                    model.sync()
        for kind in KINDS:
            self._new(number, kind).unlink(missing_ok=True)
        for pattern in ("*.update", "*.part"):
            for told in self.round(number).glob(pattern):
                told.unlink(missing_ok=True)
        self._forget(number)

    def _forget(self, number: int) -> None:
        """Remove rounds before this one, but for the last ones as far as their results are together no more than all
        weights: who comes later receives these."""
        kept, size = 0, self.base.stat().st_size
        for old in sorted((self.directory / "rounds").iterdir(), reverse=True):
            down = old / "down"
            kept += down.stat().st_size if down.exists() else 0
            if kept > size and int(old.name) <= number - KEPT:
                shutil.rmtree(old, ignore_errors=True)

    def base_of_round(self, number: int) -> Path:
        """The weights that a round began with, where there is a `snapshot`."""
        return self.round(number) / "begin.safetensors"

    def snapshot(self, committed: int) -> None:
        """Keep the weights after so many rounds, the present ones, as they are."""
        path = self.base_of_round(committed)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            if self._one_fragment:  # each round's model is a file of its own
                part.unlink(missing_ok=True)
                part.hardlink_to(self.base)
            else:
                shutil.copyfile(self.base, part)
                sync(part)
            part.rename(path)

    @property
    def _one_fragment(self) -> bool:
        """Whether a round is of the whole model."""
        return self.run.swarm is not None and self.run.swarm.fragments == 1

    def _state(self, rules: AggregationConfig, opened: Callable[[str], TensorFile]) -> ModelState:
        return ModelState(**{kind: opened(kind) for kind in self._kinds(rules)})

    def _kinds(self, rules: AggregationConfig) -> list[str]:
        """The files of the model that there are."""
        moments = dict.fromkeys(MOMENTS, rules.descent is not None)
        used = {"left": not sends_weights(rules.codec), "velocity": not rules.outer.is_plain_mean, **moments}
        return [kind for kind in KINDS if used.get(kind, True)]

    def _model(self, kind: str) -> Path:
        return self.base.with_stem(kind)

    def _new(self, number: int, kind: str) -> Path:
        return self.round(number) / f"new-{kind}"
