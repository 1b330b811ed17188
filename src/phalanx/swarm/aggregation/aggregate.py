"""What a round comes to: from what its nodes told, the new weights, and what nodes are told of them.

Everything goes piece by piece, from files to files: memory is that of a few copies of the pieces that are under way (of
one from each node for a trimmed mean), or of a layer's experts while they are merged, however large the model is. Nodes
count in the order of their names and sums are in fp64: who came first does not matter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor

from phalanx.parallel.grad_norm import clip_coefficient
from phalanx.spec.swarm import Codec
from phalanx.swarm.aggregation.adamw_step import MOMENTS, AdamWStep
from phalanx.swarm.aggregation.expert_merging import merge_experts
from phalanx.swarm.aggregation.outer_optimizer import OuterSGD
from phalanx.swarm.codec import Buffer, decode, encode
from phalanx.swarm.pieces import STACKED_EXPERTS_INFIX, ModelPiece
from phalanx.swarm.tensor_files import TensorFile
from phalanx.swarm.update_files import decode_piece, sends_weights

Robust = Literal["none", "trimmed"]
PLAIN_MEAN = OuterSGD()
MAX_CONCURRENT_PIECES = 2
"""Pieces under way: while one is computed another is read or written."""
T = TypeVar("T")


@dataclass(frozen=True)
class NodeUpdate:
    """What a node told of a round, checked."""

    node: str
    tokens: int
    """That it learned from: its weight in means."""
    file: TensorFile


@dataclass(frozen=True)
class AggregationConfig:
    """How a swarm makes one model of what its nodes tell."""

    codec: Codec = "fp32"
    outer: OuterSGD = PLAIN_MEAN
    robust: Robust = "none"
    merge_alpha: float = 0.0
    """Of this round: see `expert_merging.merge_ratio`."""
    merge_nearest: int = 4
    descent: AdamWStep | None = None
    """The step that is made of gradients, where nodes tell these (ddp)."""


@dataclass(frozen=True)
class ModelState:
    """What the coordinator has of the model, by piece."""

    base: TensorFile
    """The weights that every node has."""
    error_feedback: TensorFile | None = None
    """What coding left out of what nodes were told; where something is coded in fewer bits."""
    velocity: TensorFile | None = None
    """The outer optimizer's, where it has one."""
    exp_avg: TensorFile | None = None
    exp_avg_sq: TensorFile | None = None
    """The moments of AdamW, where the coordinator steps."""

    @property
    def files(self) -> dict[str, TensorFile]:
        """Those that there are, by kind."""
        return {kind: file for kind, file in vars(self).items() if file is not None}

    def carry_over(self, piece: ModelPiece, old: ModelState) -> None:
        """Have of a piece what there was, but for what coding left out, which `publish` keeps."""
        for kind in self.files.keys() - {"error_feedback"}:
            self.files[kind].write(piece, old.files[kind].read(piece))


def aggregate(
    pieces: Sequence[ModelPiece],
    updates: Sequence[NodeUpdate],
    config: AggregationConfig,
    old: ModelState,
    new: ModelState,
) -> dict[str, str]:
    """Fill `new` with the state after a round, but for what nodes will have of it (`publish`). Returns, of each piece
    that somebody told, who did if it was only one whose word stands: nobody else changes it; and "" of the others."""
    updates, is_merging = sorted(updates, key=lambda update: update.node), bool(config.merge_alpha and updates)
    if config.descent is not None and updates:
        return _apply_gradients(pieces, updates, config, adamw=config.descent, old=old, new=new)

    def aggregate_piece(piece: ModelPiece) -> str | None:
        piece_updates = [update for update in updates if piece.key in update.file.shapes]
        is_merged = is_merging and piece.expert is not None
        if not piece_updates:
            new.carry_over(piece, old)
            return "" if is_merged else None
        _average_updates(piece, piece_updates, config, old=old, new=new)
        return piece_updates[0].node if len(piece_updates) == 1 and config.outer.is_plain_mean and not is_merged else ""

    piece_senders = zip(pieces, _map_pieces(pieces, aggregate_piece), strict=True)
    if is_merging:
        _merge_experts(pieces, config, new.base)
    return {piece.key: sender for piece, sender in piece_senders if sender is not None}


def _map_pieces(pieces: Sequence[ModelPiece], function: Callable[[ModelPiece], T]) -> list[T]:
    """What becomes of every piece, some at a time."""
    with ThreadPoolExecutor(MAX_CONCURRENT_PIECES) as pool:
        return list(pool.map(function, pieces))


def _average_updates(
    piece: ModelPiece, updates: Sequence[NodeUpdate], config: AggregationConfig, old: ModelState, new: ModelState
) -> None:
    """A piece that these told, after the outer optimizer's step."""
    old_weights = old.base.read(piece)
    old_velocity = old.velocity.read(piece) if old.velocity else None
    values = map(partial(_decode_value, piece, old_weights, config.codec), updates)
    mean = robust_mean(values, [update.tokens for update in updates], config.robust)
    new_weights, new_velocity = config.outer.step(old_weights, mean, old_velocity)
    if new.velocity and new_velocity is not None:
        new.velocity.write(piece, new_velocity)
    new.base.write(piece, new_weights)


def _apply_gradients(
    pieces: Sequence[ModelPiece],
    updates: Sequence[NodeUpdate],
    config: AggregationConfig,
    adamw: AdamWStep,
    old: ModelState,
    new: ModelState,
) -> dict[str, str]:
    """The same of gradients, which all told of all pieces: of their mean, of at most the norm that the optimizer clips
    to, a step. It takes two passes, since the norm is that of all pieces."""

    def average_piece(piece: ModelPiece) -> Tensor:
        gradients = (decode(update.file.raw(piece.key), piece.shape, config.codec) for update in updates)
        mean_gradient = robust_mean(gradients, [update.tokens for update in updates], config.robust)
        new.base.write(piece, mean_gradient)  # until the second pass has its weights
        return mean_gradient.double().square().sum()

    clip_ratio = clip_coefficient(
        torch.stack(_map_pieces(pieces, average_piece)).sum().sqrt(), adamw.optimizer.max_grad_norm
    )

    def step_piece(piece: ModelPiece) -> None:
        weights = old.base.read(piece)
        moments = {kind: old.files[kind].read(piece) for kind in MOMENTS}
        adamw.step(piece, weights, clip_ratio * new.base.read(piece), moments)
        for kind, tensor in {"base": weights, **moments}.items():
            new.files[kind].write(piece, tensor)

    _map_pieces(pieces, step_piece)
    return dict.fromkeys((piece.key for piece in pieces), "")


def _decode_value(piece: ModelPiece, base_weights: Tensor, codec: Codec, update: NodeUpdate) -> Tensor:
    """What a node made of a piece."""
    return decode_piece(piece, update.file.raw(piece.key), codec, base=lambda _: base_weights)


def robust_mean(values: Iterable[Tensor], weights: Sequence[int], robust: Robust) -> Tensor:
    """The mean by weight, which needs one value at a time; or, of three and more, without the largest and the smallest
    value of every number, and by no weight, so that one of them can be anything (Yin et al., arXiv 1803.01498,
    definition 2)."""
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
    """A layer's experts drawn together, in place."""
    layers: dict[str, dict[str, list[ModelPiece]]] = defaultdict(lambda: defaultdict(list))
    for piece in pieces:
        if piece.expert is not None:
            layer, _, kind = piece.name.partition(STACKED_EXPERTS_INFIX)
            layers[layer][kind].append(piece)
    for kinds in layers.values():
        stacked = {
            kind: torch.stack([base.read(piece) for piece in kind_pieces]) for kind, kind_pieces in kinds.items()
        }
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
    """Write to `broadcast` what nodes are told of each piece that changed, and have `new` be what they make of it, to
    the bit. What only one node told, and stands, goes on as it came."""
    file_by_node = {update.node: update.file for update in updates}

    def broadcast_piece(piece: ModelPiece) -> None:
        sender = piece_senders.get(piece.key)
        if old.error_feedback and new.error_feedback and sender != "":
            new.error_feedback.write(piece, old.error_feedback.read(piece))
        if sender is None:
            return
        data = file_by_node[sender].raw(piece.key) if sender else _encode_update(piece, codec, old, new=new)
        broadcast.write_raw(piece.key, data)
        if not sends_weights(codec):  # else it is there, bit for bit
            new.base.write(piece, decode_piece(piece, data, codec, base=old.base.read))

    _map_pieces(pieces, broadcast_piece)


def _encode_update(piece: ModelPiece, codec: Codec, old: ModelState, new: ModelState) -> Buffer:
    """What a piece became, coded; what that leaves out is told another time."""
    new_weights = new.base.read(piece)
    if sends_weights(codec):
        return encode(new_weights, codec)
    assert old.error_feedback is not None
    assert new.error_feedback is not None
    change = new_weights - old.base.read(piece) + old.error_feedback.read(piece)
    data = encode(change, codec)
    new.error_feedback.write(piece, change - decode(data, piece.shape, codec))
    return data
