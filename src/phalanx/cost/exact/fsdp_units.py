"""Units in which ZeRO-3 gathers parameters and reduces gradients.

Every wrapped part of blocks is one. The embedding is one, and the final norm and head another, or the root has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phalanx.program.rank_tensors import RankTensors
from phalanx.spec.layout import EMBEDDINGS, Layout, has_outer_fsdp_units
from phalanx.spec.parameter_shapes import Shapes, num_elements
from phalanx.spec.parts.operations import Shape
from phalanx.spec.tensor_sharding import data_parallel_axis, max_shard_elements

ROOT = ""
EMBEDDING = "embedding"
HEAD = "head"


@dataclass(frozen=True, kw_only=True)
class FsdpUnitSizes:
    """Elements that a rank owns, with padding, of each unit."""

    root: int
    """Elements outside blocks of a root that owns them; 0 if they are two units."""
    embedding: int
    """Elements of the unit of embeddings; 0 without it."""
    head: int
    """Elements of the unit of the final norm and head; 0 without it."""
    blocks: list[int]
    """Elements of each wrapped part of blocks."""

    @property
    def last_reduced(self) -> int:
        """Elements of the unit whose gradients are the last of a backward pass: the root or the embeddings."""
        return self.root or self.embedding

    @property
    def largest(self) -> int:
        """Elements of the largest unit."""
        return max(self.root, self.embedding, self.head, *self.blocks)

    @property
    def total(self) -> int:
        """Elements of all units."""
        return self.root + self.embedding + self.head + sum(self.blocks)


def fsdp_unit_sizes(shapes: Shapes, layout: Layout, ranks: int) -> FsdpUnitSizes:
    """Return the elements that a rank owns of each unit.

    Args:
        shapes: Parameters of the rank.
        ranks: Ranks that share the parameters.
    """
    unit_of = fsdp_unit_namer(layout, "head.weight" not in shapes)
    owned = {ROOT: 0, EMBEDDING: 0, HEAD: 0}
    for name, shape in shapes.items():
        unit = unit_of(name)
        owned[unit] = owned.get(unit, 0) + max_shard_elements(shape, ranks)
    root, embedding, head, *blocks = owned.values()
    return FsdpUnitSizes(root=root, embedding=embedding, head=head, blocks=blocks)


def fsdp_unit_namer(layout: Layout, tie_embeddings: bool) -> Callable[[str], str]:
    """Return the function that returns the name of a parameter's FSDP unit.

    Args:
        tie_embeddings: True if the embedding is the head too.
    """
    has_outer_units = has_outer_fsdp_units(layout, tie_embeddings)
    # "blocks.0.attention.wq.weight": a block is the first two names, a sublayer three. Recomputed blocks stay one unit.
    depth = {"model": 0, "block": 2, "sublayer": 2 if layout.recomputes_full_blocks else 3}[layout.fsdp_unit]

    def unit_of(name: str) -> str:
        if not name.startswith("blocks."):
            return ROOT if not has_outer_units else EMBEDDING if name.startswith(EMBEDDINGS) else HEAD
        return ".".join(name.split(".", depth)[:depth])

    return unit_of


@dataclass(frozen=True, kw_only=True)
class FsdpUnit:
    """Parameters that FSDP2 gathers and reduces together."""

    name: str
    ranks: int
    """Ranks that share the parameters."""
    shapes: dict[str, Shape]
    parent: str | None = None
    """Name of the unit that contains this one: a block's, for experts with data-parallel ranks of their own."""

    @property
    def owned(self) -> int:
        """Elements that a rank owns, with padding."""
        return sum(max_shard_elements(shape, self.ranks) for shape in self.shapes.values())

    @property
    def gradients(self) -> int:
        """Elements of the gradients, without padding."""
        return sum(map(num_elements, self.shapes.values()))

    @property
    def stacks(self) -> list[int]:
        """Elements of each stack of matrices whose rows are sharded; FSDP2 copies it to and from the order of ranks."""
        return [num_elements(shape) for shape in self.shapes.values() if data_parallel_axis(shape, self.ranks)]

    @property
    def last_gradients(self) -> int:
        """Elements of the gradients of the last parameter and of the last of `stacks`, which may be the same."""
        stacks = [name for name, shape in self.shapes.items() if data_parallel_axis(shape, self.ranks)]
        return sum(num_elements(self.shapes[name]) for name in {*list(self.shapes)[-1:], *stacks[-1:]})


def backward_fsdp_units(rank: RankTensors, layout: Layout) -> list[FsdpUnit]:
    """Return the units in the order in which their backward passes end: the head's first, the root or embedding last.

    Experts that have data-parallel ranks of their own are units in blocks, whose backward pass ends before the block's.

    Args:
        rank: Tensors of the rank.
    """
    unit_of = fsdp_unit_namer(layout, "head.weight" not in rank.all)
    units: dict[str, FsdpUnit] = {}
    for name, shape in rank.all.items():
        unit_name = unit_of(name)
        units.setdefault(unit_name, FsdpUnit(name=unit_name, ranks=rank.shards, shapes={}))
        if name in rank.expert:
            parent, unit_name = unit_name, name.rpartition(".")[0]
            units.setdefault(unit_name, FsdpUnit(name=unit_name, ranks=rank.expert_shards, shapes={}, parent=parent))
        units[unit_name].shapes[name] = shape
    last = [units.pop(name) for name in (EMBEDDING, ROOT) if name in units]
    head = [units.pop(HEAD)] if HEAD in units else []
    return [*head, *reversed(units.values()), *last]
