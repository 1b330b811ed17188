"""Units in which ZeRO-3 gathers parameters and reduces gradients, and the order in which they are gathered.

Every wrapped part of blocks is one. The embedding is one, and the final norm and head another, or the root has them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

from phalanx.program.rank_tensors import RankTensors
from phalanx.spec.layout import EMBEDDINGS, Layout
from phalanx.spec.parameter_shapes import Shapes, num_elements
from phalanx.spec.parts.per_layer_inputs import NAME as LAYER_INPUTS
from phalanx.spec.tensor_sharding import data_parallel_axis, max_shard_elements

T = TypeVar("T")
ROOT = ""
EMBEDDING = "embedding"
HEAD = "head"


@dataclass(frozen=True, kw_only=True)
class FsdpUnit:
    """Parameters that FSDP2 gathers and reduces together."""

    name: str
    ranks: int
    """Ranks that share the parameters."""
    shapes: Shapes
    frozen: frozenset[str] = frozenset()
    """Names of those that are gathered only."""
    quantized: frozenset[str] = frozenset()
    """Names of those whose elements are bytes."""
    has_backward: bool = True
    """False if nothing up to this unit is trained."""
    parent: str | None = None
    """Name of the unit that contains this one: a block's or the root, for experts with data-parallel ranks of their
    own."""

    @property
    def is_in_blocks(self) -> bool:
        """True for a block or a part of one."""
        return self.name.startswith("blocks.")

    @property
    def is_inner(self) -> bool:
        """True if a unit other than the root contains this one."""
        return self.parent is not None and self.parent != ROOT

    @cached_property
    def trained(self) -> Shapes:
        """Parameters whose gradients are reduced."""
        return {name: shape for name, shape in self.shapes.items() if name not in self.frozen}

    @cached_property
    def owned(self) -> int:
        """Elements that a rank owns, with padding."""
        return sum(max_shard_elements(shape, self.ranks) for shape in self.shapes.values())

    @cached_property
    def owned_gradients(self) -> int:
        """Elements of the gradients that a rank owns, with padding."""
        return sum(max_shard_elements(shape, self.ranks) for shape in self.trained.values())

    @cached_property
    def reduced(self) -> int:
        """Elements of the gradients of all ranks together, with padding."""
        return self.owned_gradients * self.ranks

    def owned_bytes(self, size: int) -> int:
        """Return the bytes of what a rank owns, with padding, where an element has `size` bytes unless quantized."""
        return sum(
            (1 if name in self.quantized else size) * max_shard_elements(shape, self.ranks)
            for name, shape in self.shapes.items()
        )

    def gathered_bytes(self, size: int) -> int:
        """Return the bytes of all ranks together, as `owned_bytes`."""
        return self.owned_bytes(size) * self.ranks

    @cached_property
    def gradients(self) -> int:
        """Elements of the gradients, without padding."""
        return sum(map(num_elements, self.trained.values()))

    def stack_bytes(self, size: int) -> int:
        """Return the bytes of stacks of matrices whose rows are sharded, as `owned_bytes`.

        FSDP2 copies them to and from the order of ranks."""
        return sum(
            (1 if name in self.quantized else size) * num_elements(self.shapes[name]) for name in self._stack_names
        )

    @cached_property
    def trained_stacks(self) -> list[int]:
        """Elements of each of these stacks that has gradients."""
        return [num_elements(self.trained[name]) for name in self._stack_names if name in self.trained]

    @cached_property
    def _stack_names(self) -> list[str]:
        return [name for name, shape in self.shapes.items() if data_parallel_axis(shape, self.ranks)]

    @property
    def last_gradients(self) -> int:
        """Elements of the gradients that FSDP2 keeps while it reduces: of the last parameter and the last of `stacks`.

        They are the variables of loops of `foreach_reduce`, which has no loop on a single rank."""
        if self.ranks == 1:
            return 0
        stacks = [name for name in self._stack_names if name in self.trained]
        return sum(num_elements(self.trained[name]) for name in {*list(self.trained)[-1:], *stacks[-1:]})


def outer_unit_name(layout: Layout, reads_ends_twice: bool, name: str) -> str:
    """Return the name of the unit of a parameter or module outside blocks.

    The root owns parameters that both ends of a pass use: tied embeddings, and what computes the inputs of layers. It
    also owns those of a pipeline, which stay gathered for the step."""
    if reads_ends_twice or layout.fsdp_unit == "model" or layout.pp > 1:
        return ROOT
    return EMBEDDING if name.startswith(EMBEDDINGS) else HEAD


def fsdp_unit_namer(layout: Layout, reads_ends_twice: bool) -> Callable[[str], str]:
    """Return the function that returns the name of a parameter's unit, for parameters that all ranks shard alike."""
    # "blocks.0.attention.wq.weight": a block is the first two names, a sublayer three. Recomputed blocks stay one unit.
    depth = {"model": 0, "block": 2, "sublayer": 2 if layout.recomputes_full_blocks else 3}[layout.fsdp_unit]

    def unit_of(name: str) -> str:
        if not name.startswith("blocks."):
            return outer_unit_name(layout, reads_ends_twice, name)
        return ".".join(name.split(".", depth)[:depth])

    return unit_of


def late_parameters(root: FsdpUnit) -> list[str]:
    """Return the names of a root's parameters whose gradients follow those of all blocks."""
    late = LAYER_INPUTS if "head.weight" not in root.shapes else (*EMBEDDINGS, LAYER_INPUTS)
    return [name for name in root.trained if name.startswith(late)]


def expert_unit_name(name: str) -> str:
    """Return the name of the unit of a parameter of experts with data-parallel ranks of their own: their module."""
    return name.rpartition(".")[0]


def fsdp_units(rank: RankTensors, layout: Layout) -> list[FsdpUnit]:
    """Return the units of a rank in the order of the forward pass: a root or the embedding first, the head last.

    Experts that have data-parallel ranks of their own are units inside a block, and follow it."""
    has_layer_inputs = any(name.startswith(f"{LAYER_INPUTS}.") for name in rank.all)
    unit_of = fsdp_unit_namer(layout, has_layer_inputs or "head.weight" not in rank.all)
    units: dict[str, FsdpUnit] = {}
    for name, shape in rank.all.items():
        unit_name = unit_of(name)
        parts = unit_name.split(".")
        has_backward = parts[0] != "blocks" or int(parts[1]) >= rank.num_forward_only_blocks
        make_unit = partial(
            FsdpUnit, shapes={}, frozen=rank.frozen, quantized=rank.quantized, has_backward=has_backward
        )
        units.setdefault(unit_name, make_unit(name=unit_name, ranks=rank.shards))
        if name in rank.expert:
            parent, unit_name = unit_name, expert_unit_name(name)
            units.setdefault(unit_name, make_unit(name=unit_name, ranks=rank.expert_shards, parent=parent))
        units[unit_name].shapes[name] = shape
    root = [units.pop(ROOT)] if ROOT in units else []
    return [*root, *units.values()]


def backward_order(units: Sequence[T], has_root: bool) -> list[T]:
    """Return units in the order in which their backward passes start: a root, which contains the others, first.

    `units` are in the order of the forward pass. The backward passes end in the reverse of that order."""
    root = units[: int(has_root)]
    return [*root, *reversed(units[int(has_root) :])]


def backward_prefetches(units: Sequence[T], depth: int) -> list[list[T]]:
    """Return the units that each of `units`, in the order of backward passes, gathers ahead."""
    return [list(units[index + 1 : index + 1 + depth]) for index in range(len(units))]


def forward_prefetches(units: Sequence[T], inner: Collection[T], depth: int) -> list[list[T]]:
    """Return the units that each of `units`, in the order of the forward pass, gathers ahead.

    `inner` are the units inside other units (those that only the root contains do not count). They prefetch nothing,
    and their outer units prefetch one unit more. Otherwise the recomputation of a block, in which the hooks of its
    outer unit are off, would let an inner unit gather the next block again."""
    prefetches = []
    for index, unit in enumerate(units):
        following = units[index + 1 :]
        num_ahead = depth + 1 if depth and following and following[0] in inner else depth
        prefetches.append([] if unit in inner else list(following[:num_ahead]))
    return prefetches
