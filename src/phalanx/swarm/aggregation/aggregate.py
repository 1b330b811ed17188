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
from phalanx.swarm.pieces import STACKED, ModelPiece
from phalanx.swarm.tensor_files import TensorFile
from phalanx.swarm.update_files import decode_piece, sends_weights

Robust = Literal["none", "trimmed"]
AVERAGE = OuterSGD()
AT_A_TIME = 2
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
    outer: OuterSGD = AVERAGE
    robust: Robust = "none"
    merge_alpha: float = 0.0
    """Of this round: see `merge.merge_ratio`."""
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

    def carry_over(self, item: ModelPiece, old: ModelState) -> None:
        """Have of a piece what there was, but for what coding left out, which `publish` keeps."""
        for kind in self.files.keys() - {"left"}:
            self.files[kind].write(item, old.files[kind].read(item))


def aggregate(
    items: Sequence[ModelPiece], told: Sequence[NodeUpdate], rules: AggregationConfig, old: ModelState, new: ModelState
) -> dict[str, str]:
    """Fill `new` with the state after a round, but for what nodes will have of it (`publish`). Returns, of each piece
    that somebody told, who did if it was only one whose word stands: nobody else changes it; and "" of the others."""
    told, merging = sorted(told, key=lambda one: one.node), bool(rules.merge_alpha and told)
    if rules.descent is not None and told:
        return _apply_gradients(items, told, rules, rules.descent, old, new)

    def word(item: ModelPiece) -> str | None:
        mine = [one for one in told if item.key in one.file.shapes]
        merged = merging and item.expert is not None
        if not mine:
            new.carry_over(item, old)
            return "" if merged else None
        _average(item, mine, rules, old, new)
        return mine[0].node if len(mine) == 1 and rules.outer.is_plain_mean and not merged else ""

    words = zip(items, _map_pieces(items, word), strict=True)
    if merging:
        _merge(items, rules, new.base)
    return {item.key: of_whom for item, of_whom in words if of_whom is not None}


def _map_pieces(items: Sequence[ModelPiece], work: Callable[[ModelPiece], T]) -> list[T]:
    """What becomes of every piece, some at a time."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return list(pool.map(work, items))


def _average(
    item: ModelPiece, told: Sequence[NodeUpdate], rules: AggregationConfig, old: ModelState, new: ModelState
) -> None:
    """A piece that these told, after the outer optimizer's step."""
    before, moving = old.base.read(item), old.velocity.read(item) if old.velocity else None
    values = map(partial(_decode_value, item, before, rules.codec), told)
    mean = robust_mean(values, [one.tokens for one in told], rules.robust)
    after, velocity = rules.outer.step(before, mean, moving)
    if new.velocity and velocity is not None:
        new.velocity.write(item, velocity)
    new.base.write(item, after)


def _apply_gradients(
    items: Sequence[ModelPiece],
    told: Sequence[NodeUpdate],
    rules: AggregationConfig,
    descent: AdamWStep,
    old: ModelState,
    new: ModelState,
) -> dict[str, str]:
    """The same of gradients, which all told of all pieces: of their mean, of at most the norm that the optimizer clips
    to, a step. It takes two passes, since the norm is that of all pieces."""

    def mean(item: ModelPiece) -> Tensor:
        gradients = (decode(one.file.raw(item.key), item.shape, rules.codec) for one in told)
        found = robust_mean(gradients, [one.tokens for one in told], rules.robust)
        new.base.write(item, found)  # until the second pass has its weights
        return found.double().square().sum()

    ratio = clip_coefficient(torch.stack(_map_pieces(items, mean)).sum().sqrt(), descent.optimizer.max_grad_norm)

    def step(item: ModelPiece) -> None:
        weights, moments = old.base.read(item), {kind: old.files[kind].read(item) for kind in MOMENTS}
        descent.step(item, weights, ratio * new.base.read(item), moments)
        for kind, tensor in {"base": weights, **moments}.items():
            new.files[kind].write(item, tensor)

    _map_pieces(items, step)
    return dict.fromkeys((item.key for item in items), "")


def _decode_value(item: ModelPiece, before: Tensor, codec: Codec, told: NodeUpdate) -> Tensor:
    """What a node made of a piece."""
    return decode_piece(item, told.file.raw(item.key), codec, lambda _: before)


def robust_mean(values: Iterable[Tensor], weights: Sequence[int], robust: Robust) -> Tensor:
    """The mean by weight, which needs one value at a time; or, of three and more, without the largest and the smallest
    value of every number, and by no weight, so that one of them can be anything (Yin et al., arXiv 1803.01498,
    definition 2)."""
    each = iter(values)
    if len(weights) == 1:
        return next(each)
    if robust == "trimmed" and len(weights) > 2:
        stacked = torch.stack(list(each)).double().sort(dim=0).values
        return stacked[1:-1].mean(0).float()
    total = weights[0] * next(each).double()
    for value, weight in zip(each, weights[1:], strict=True):
        total.add_(value, alpha=weight)
    return (total / sum(weights)).float()


def _merge(items: Sequence[ModelPiece], rules: AggregationConfig, base: TensorFile) -> None:
    """A layer's experts drawn together, in place."""
    layers: dict[str, dict[str, list[ModelPiece]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if item.expert is not None:
            layer, _, kind = item.name.partition(STACKED)
            layers[layer][kind].append(item)
    for kinds in layers.values():
        stacked = {kind: torch.stack([base.read(item) for item in of_kind]) for kind, of_kind in kinds.items()}
        merge_experts(stacked, rules.merge_alpha, rules.merge_nearest)
        for kind, of_kind in kinds.items():
            for item, expert in zip(of_kind, stacked[kind], strict=True):
                base.write(item, expert)


def encode_broadcast(
    items: Sequence[ModelPiece],
    told: Sequence[NodeUpdate],
    stands: dict[str, str],
    codec: Codec,
    old: ModelState,
    new: ModelState,
    down: TensorFile,
) -> None:
    """Write to `down` what nodes are told of each piece that changed, and have `new` be what they make of it, to the
    bit. What only one node told, and stands, goes on as it came."""
    by_node = {one.node: one.file for one in told}

    def tell(item: ModelPiece) -> None:
        owner = stands.get(item.key)
        if old.error_feedback and new.error_feedback and owner != "":
            new.error_feedback.write(item, old.error_feedback.read(item))
        if owner is None:
            return
        data = by_node[owner].raw(item.key) if owner else _coded(item, codec, old, new)
        down.write_raw(item.key, data)
        if not sends_weights(codec):  # else it is there, bit for bit
            new.base.write(item, decode_piece(item, data, codec, old.base.read))

    _map_pieces(items, tell)


def _coded(item: ModelPiece, codec: Codec, old: ModelState, new: ModelState) -> Buffer:
    """What a piece became, coded; what that leaves out is told another time."""
    after = new.base.read(item)
    if sends_weights(codec):
        return encode(after, codec)
    assert old.error_feedback is not None
    assert new.error_feedback is not None
    change = after - old.base.read(item) + old.error_feedback.read(item)
    data = encode(change, codec)
    new.error_feedback.write(item, change - decode(data, item.shape, codec))
    return data
