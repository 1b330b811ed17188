"""Aggregation of a round: the new weights from the nodes' updates, and the broadcast to the nodes.

All data moves piece by piece between files. The memory is that of a few copies of the active pieces (one per node for a
trimmed mean), or of a layer's experts during their merging, for any model size. Nodes are ordered by name and sums are
in fp64, so the result does not depend on the order of arrival.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from phalanx.parallel.grad_norm import clip_coefficient
from phalanx.spec.run import RunSpec
from phalanx.spec.swarm import Codec
from phalanx.swarm.aggregation.adamw_step import MOMENTS, AdamWStep
from phalanx.swarm.aggregation.expert_merging import merge_experts, merge_ratio
from phalanx.swarm.aggregation.outer_optimizer import OuterSGD
from phalanx.swarm.codec import Buffer, decode, encode
from phalanx.swarm.pieces import STACKED_EXPERTS_INFIX, ModelPiece
from phalanx.swarm.tensor_files import TensorFile
from phalanx.swarm.update_files import decode_piece, sends_weights
from phalanx.train.optim.optimizers import learning_rate_factor

Robust = Literal["none", "trimmed"]
PLAIN_MEAN = OuterSGD()
MAX_CONCURRENT_PIECES = 2
"""Number of active pieces: one is computed while another is read or written."""
T = TypeVar("T")


@dataclass(frozen=True)
class NodeUpdate:
    """A checked update of a node."""

    node: str
    tokens: int
    """Number of targets that the node trained on: its weight in means."""
    file: TensorFile


@dataclass(frozen=True, kw_only=True)
class AggregationConfig:
    """Settings for the aggregation of the nodes' updates."""

    codec: Codec = "fp32"
    outer: OuterSGD = PLAIN_MEAN
    robust: Robust = "none"
    merge_alpha: float = 0.0
    """Merge ratio of this round (`expert_merging.merge_ratio`)."""
    merge_nearest: int = 4
    descent: AdamWStep | None = None
    """The optimizer step on gradients, if nodes send gradients (ddp)."""


def aggregation_config(run: RunSpec, round_number: int, learned_rounds: int = 0) -> AggregationConfig:
    """Return the settings for aggregating a round.

    `learned_rounds`, the earlier rounds that updated the weights, is the step count of AdamW.
    """
    swarm = run.swarm
    assert swarm is not None
    step = (round_number + 1) * swarm.steps_per_round
    outer = swarm.outer_optimizer
    merges_experts = swarm.merge.every and (round_number // swarm.fragments + 1) * swarm.every % swarm.merge.every == 0
    lr_ratio = learning_rate_factor(run.optimizer, round_number, run.training.steps)
    return AggregationConfig(
        codec=swarm.effective_codec,
        outer=OuterSGD(outer.learning_rate, outer.momentum),
        robust=swarm.robust,
        merge_alpha=merge_ratio(step, swarm.merge.alpha, swarm.merge.steps) if merges_experts else 0.0,
        merge_nearest=swarm.merge.nearest,
        descent=AdamWStep(run.optimizer, lr_ratio, learned_rounds) if swarm.sends_gradients else None,
    )


@dataclass(frozen=True, kw_only=True)
class ModelState:
    """The coordinator's files of the model, by piece."""

    base: TensorFile
    """The weights that every node has."""
    error_feedback: TensorFile | None = None
    """The error of encoded broadcasts, for codecs with fewer bits than fp32."""
    velocity: TensorFile | None = None
    """The velocity of an outer optimizer with momentum."""
    exp_avg: TensorFile | None = None
    exp_avg_sq: TensorFile | None = None
    """The moments of AdamW, if the coordinator steps."""

    @property
    def files(self) -> dict[str, TensorFile]:
        """The existing files by kind."""
        return {kind: file for kind, file in vars(self).items() if file is not None}

    def carry_over(self, piece: ModelPiece, old: ModelState) -> None:
        """Copy a piece from the old state, except for the error feedback, which `encode_broadcast` copies."""
        for kind in self.files.keys() - {"error_feedback"}:
            self.files[kind].write(piece, old.files[kind].read(piece))


def aggregate(
    pieces: Sequence[ModelPiece],
    updates: Sequence[NodeUpdate],
    config: AggregationConfig,
    old: ModelState,
    new: ModelState,
) -> dict[str, str]:
    """Write the state after a round to `new`, without the effects of `encode_broadcast`.

    Return the updated pieces by key. The value is the node if one node alone changes the piece and its update is final,
    else "".
    """
    updates = sorted(updates, key=lambda update: update.node)
    is_merging = bool(config.merge_alpha and updates)
    if config.descent is not None and updates:
        return _apply_gradients(pieces, updates, config, config.descent, old, new)

    def aggregate_piece(piece: ModelPiece) -> str | None:
        piece_updates = [update for update in updates if piece.key in update.file.shapes]
        is_merged = is_merging and piece.expert is not None
        if not piece_updates:
            new.carry_over(piece, old)
            return "" if is_merged else None
        old_weights = old.base.read(piece)
        values = (
            decode_piece(piece, update.file.raw(piece.key), config.codec, lambda _: old_weights)
            for update in piece_updates
        )
        mean = robust_mean(values, [update.tokens for update in piece_updates], config.robust)
        old_velocity = old.velocity.read(piece) if old.velocity else None
        new_weights, new_velocity = config.outer.step(old_weights, mean, old_velocity)
        if new.velocity and new_velocity is not None:
            new.velocity.write(piece, new_velocity)
        new.base.write(piece, new_weights)
        is_final = len(piece_updates) == 1 and config.outer.is_plain_mean and not is_merged
        return piece_updates[0].node if is_final else ""

    piece_senders = zip(pieces, _map_pieces(pieces, aggregate_piece), strict=True)
    if is_merging:
        _merge_experts(pieces, config, new.base)
    return {piece.key: sender for piece, sender in piece_senders if sender is not None}


def _map_pieces(pieces: Sequence[ModelPiece], function: Callable[[ModelPiece], T]) -> list[T]:
    """Apply a function to every piece, several at a time."""
    with ThreadPoolExecutor(MAX_CONCURRENT_PIECES) as pool:
        return list(pool.map(function, pieces))


def _apply_gradients(
    pieces: Sequence[ModelPiece],
    updates: Sequence[NodeUpdate],
    config: AggregationConfig,
    adamw: AdamWStep,
    old: ModelState,
    new: ModelState,
) -> dict[str, str]:
    """Apply an optimizer step with the mean of the nodes' gradients, clipped to the maximum norm.

    Every node sends all pieces. The norm is that of all pieces, so there are two passes.
    """

    def average_piece(piece: ModelPiece) -> Tensor:
        gradients = (decode(update.file.raw(piece.key), piece.shape, config.codec) for update in updates)
        mean_gradient = robust_mean(gradients, [update.tokens for update in updates], config.robust)
        # The gradient is stored here until the second pass writes the weights.
        new.base.write(piece, mean_gradient)
        return mean_gradient.double().square().sum()

    norm = torch.stack(_map_pieces(pieces, average_piece)).sum().sqrt()
    clip_ratio = clip_coefficient(norm, adamw.optimizer.max_grad_norm)

    def step_piece(piece: ModelPiece) -> None:
        weights = old.base.read(piece)
        moments = {kind: old.files[kind].read(piece) for kind in MOMENTS}
        adamw.step(piece, weights, clip_ratio * new.base.read(piece), moments)
        for kind, tensor in {"base": weights, **moments}.items():
            new.files[kind].write(piece, tensor)

    _map_pieces(pieces, step_piece)
    return dict.fromkeys((piece.key for piece in pieces), "")


def robust_mean(values: Iterable[Tensor], weights: Sequence[int], robust: Robust) -> Tensor:
    """Return the weighted mean, or the trimmed mean of three and more values.

    The weighted mean needs one value in memory at a time. The trimmed mean excludes the maximum and the minimum of
    every element and uses no weights, so that one value can be arbitrary (Yin et al., arXiv 1803.01498, definition 2).
    """
    remaining = iter(values)
    if len(weights) == 1:
        return next(remaining)
    if robust == "trimmed" and len(weights) > 2:
        stacked = torch.stack(list(remaining)).double().sort(dim=0).values
        return stacked[1:-1].mean(0).float()
    total = weights[0] * next(remaining).double()
    for value, weight in zip(remaining, weights[1:], strict=True):
        total.add_(value, alpha=weight)
    return (total / sum(weights)).float()


def _merge_experts(pieces: Sequence[ModelPiece], config: AggregationConfig, base: TensorFile) -> None:
    """Merge the experts of each layer, in place."""
    layers: dict[str, dict[str, list[ModelPiece]]] = defaultdict(lambda: defaultdict(list))
    for piece in pieces:
        if piece.expert is not None:
            layer, _, kind = piece.name.partition(STACKED_EXPERTS_INFIX)
            layers[layer][kind].append(piece)
    for kinds in layers.values():
        stacked = {kind: torch.stack(list(map(base.read, kind_pieces))) for kind, kind_pieces in kinds.items()}
        merge_experts(stacked, config.merge_alpha, config.merge_nearest)
        for kind, kind_pieces in kinds.items():
            for piece, expert in zip(kind_pieces, stacked[kind], strict=True):
                base.write(piece, expert)


def encode_broadcast(
    pieces: Sequence[ModelPiece],
    updates: Sequence[NodeUpdate],
    piece_senders: dict[str, str],
    codec: Codec,
    old: ModelState,
    new: ModelState,
    broadcast: TensorFile,
) -> None:
    """Write the broadcast of each updated piece, and set `new` to the values that nodes decode from it.

    A final update of a single node is forwarded as it was received. `piece_senders` is the result of `aggregate`.
    """
    file_by_node = {update.node: update.file for update in updates}

    def broadcast_piece(piece: ModelPiece) -> None:
        sender = piece_senders.get(piece.key)
        if old.error_feedback and new.error_feedback and sender != "":
            new.error_feedback.write(piece, old.error_feedback.read(piece))
        if sender is None:
            return
        data: Buffer
        if sender:
            data = file_by_node[sender].raw(piece.key)
        elif sends_weights(codec):
            data = encode(new.base.read(piece), codec)
        else:
            assert old.error_feedback is not None
            assert new.error_feedback is not None
            change = new.base.read(piece) - old.base.read(piece) + old.error_feedback.read(piece)
            data = encode(change, codec)
            # The encoding error becomes error feedback for a later round.
            new.error_feedback.write(piece, change - decode(data, piece.shape, codec))
        broadcast.write_raw(piece.key, data)
        # With exact weights, `new` already has the values that nodes decode.
        if not sends_weights(codec):
            new.base.write(piece, decode_piece(piece, data, codec, old.base.read))

    _map_pieces(pieces, broadcast_piece)
