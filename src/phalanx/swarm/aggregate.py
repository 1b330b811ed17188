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

from phalanx.parallel.gradient import clip_ratio
from phalanx.spec.swarm import Codec
from phalanx.swarm.codec import Buffer, decode, encode
from phalanx.swarm.descent import MOMENTS, Descent
from phalanx.swarm.items import STACKED, Item
from phalanx.swarm.merge import merge
from phalanx.swarm.outer import Outer
from phalanx.swarm.tensors import TensorFile
from phalanx.swarm.update import heard, sends_weights

Robust = Literal["none", "trimmed"]
AVERAGE = Outer()
AT_A_TIME = 2
"""Pieces under way: while one is computed another is read or written."""
T = TypeVar("T")


@dataclass(frozen=True)
class Told:
    """What a node told of a round, checked."""

    node: str
    tokens: int
    """That it learned from: its weight in means."""
    file: TensorFile


@dataclass(frozen=True)
class Rules:
    """How a swarm makes one model of what its nodes tell."""

    codec: Codec = "fp32"
    outer: Outer = AVERAGE
    robust: Robust = "none"
    merge_alpha: float = 0.0
    """Of this round: see `merge.merge_ratio`."""
    merge_nearest: int = 4
    descent: Descent | None = None
    """The step that is made of gradients, where nodes tell these (ddp)."""


@dataclass(frozen=True)
class State:
    """What the coordinator has of the model, by piece."""

    base: TensorFile
    """The weights that every node has."""
    left: TensorFile | None = None
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

    def keep(self, item: Item, old: State) -> None:
        """Have of a piece what there was, but for what coding left out, which `publish` keeps."""
        for kind in self.files.keys() - {"left"}:
            self.files[kind].write(item, old.files[kind].read(item))


def aggregate(items: Sequence[Item], told: Sequence[Told], rules: Rules, old: State, new: State) -> dict[str, str]:
    """Fill `new` with the state after a round, but for what nodes will have of it (`publish`). Returns, of each piece
    that somebody told, who did if it was only one whose word stands: nobody else changes it; and "" of the others."""
    told, merging = sorted(told, key=lambda one: one.node), bool(rules.merge_alpha and told)
    if rules.descent is not None and told:
        return _descend(items, told, rules, rules.descent, old, new)

    def word(item: Item) -> str | None:
        mine = [one for one in told if item.key in one.file.shapes]
        merged = merging and item.expert is not None
        if not mine:
            new.keep(item, old)
            return "" if merged else None
        _average(item, mine, rules, old, new)
        return mine[0].node if len(mine) == 1 and rules.outer.averages and not merged else ""

    words = zip(items, _each(items, word), strict=True)
    if merging:
        _merge(items, rules, new.base)
    return {item.key: of_whom for item, of_whom in words if of_whom is not None}


def _each(items: Sequence[Item], work: Callable[[Item], T]) -> list[T]:
    """What becomes of every piece, some at a time."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return list(pool.map(work, items))


def _average(item: Item, told: Sequence[Told], rules: Rules, old: State, new: State) -> None:
    """A piece that these told, after the outer optimizer's step."""
    before, moving = old.base.read(item), old.velocity.read(item) if old.velocity else None
    values = map(partial(_value, item, before, rules.codec), told)
    mean = combined(values, [one.tokens for one in told], rules.robust)
    after, velocity = rules.outer.step(before, mean, moving)
    if new.velocity and velocity is not None:
        new.velocity.write(item, velocity)
    new.base.write(item, after)


def _descend(
    items: Sequence[Item], told: Sequence[Told], rules: Rules, descent: Descent, old: State, new: State
) -> dict[str, str]:
    """The same of gradients, which all told of all pieces: of their mean, of at most the norm that the optimizer clips
    to, a step. It takes two passes, since the norm is that of all pieces."""

    def mean(item: Item) -> Tensor:
        gradients = (decode(one.file.raw(item.key), item.shape, rules.codec) for one in told)
        found = combined(gradients, [one.tokens for one in told], rules.robust)
        new.base.write(item, found)  # until the second pass has its weights
        return found.double().square().sum()

    ratio = clip_ratio(torch.stack(_each(items, mean)).sum().sqrt(), descent.optimizer.clip_norm)

    def step(item: Item) -> None:
        weights, moments = old.base.read(item), {kind: old.files[kind].read(item) for kind in MOMENTS}
        descent.step(item, weights, ratio * new.base.read(item), moments)
        for kind, tensor in {"base": weights, **moments}.items():
            new.files[kind].write(item, tensor)

    _each(items, step)
    return dict.fromkeys((item.key for item in items), "")


def _value(item: Item, before: Tensor, codec: Codec, told: Told) -> Tensor:
    """What a node made of a piece."""
    return heard(item, told.file.raw(item.key), codec, lambda _: before)


def combined(values: Iterable[Tensor], weights: Sequence[int], robust: Robust) -> Tensor:
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


def _merge(items: Sequence[Item], rules: Rules, base: TensorFile) -> None:
    """A layer's experts drawn together, in place."""
    layers: dict[str, dict[str, list[Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if item.expert is not None:
            layer, _, kind = item.name.partition(STACKED)
            layers[layer][kind].append(item)
    for kinds in layers.values():
        stacked = {kind: torch.stack([base.read(item) for item in of_kind]) for kind, of_kind in kinds.items()}
        merge(stacked, rules.merge_alpha, rules.merge_nearest)
        for kind, of_kind in kinds.items():
            for item, expert in zip(of_kind, stacked[kind], strict=True):
                base.write(item, expert)


def publish(
    items: Sequence[Item], told: Sequence[Told], stands: dict[str, str], codec: Codec, old: State, new: State,
    down: TensorFile,
) -> None:  # fmt: skip
    """Write to `down` what nodes are told of each piece that changed, and have `new` be what they make of it, to the
    bit. What only one node told, and stands, goes on as it came."""
    by_node = {one.node: one.file for one in told}

    def tell(item: Item) -> None:
        owner = stands.get(item.key)
        if old.left and new.left and owner != "":
            new.left.write(item, old.left.read(item))
        if owner is None:
            return
        data = by_node[owner].raw(item.key) if owner else _coded(item, codec, old, new)
        down.write_raw(item.key, data)
        if not sends_weights(codec):  # else it is there, bit for bit
            new.base.write(item, heard(item, data, codec, old.base.read))

    _each(items, tell)


def _coded(item: Item, codec: Codec, old: State, new: State) -> Buffer:
    """What a piece became, coded; what that leaves out is told another time."""
    after = new.base.read(item)
    if sends_weights(codec):
        return encode(after, codec)
    assert old.left is not None
    assert new.left is not None
    change = after - old.base.read(item) + old.left.read(item)
    data = encode(change, codec)
    new.left.write(item, change - decode(data, item.shape, codec))
    return data
