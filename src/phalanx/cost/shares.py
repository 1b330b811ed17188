"""What each rank of a pipeline has of a model in stages and shares: shapes by name, and among how many ranks data
parallelism may split them further."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

from phalanx.cost.shapes import Shape, Shapes, in_any_block, parameter_shapes
from phalanx.cost.stages import stage_layers
from phalanx.schedule.named import any_schedule_of
from phalanx.spec.layout import SHARDED, Layout, degrees
from phalanx.spec.run import RunSpec
from phalanx.spec.share import Share, rows_of, tensor_share


@dataclass(frozen=True)
class Held:
    """The tensors of a rank."""

    dense: Shapes
    """All but experts that are apart, of which each data-parallel rank has a copy, or some rows."""
    shards: int
    """Ranks that have rows of these."""
    apart: Shapes
    """Experts, where ranks have different ones."""
    apart_shards: int
    """Ranks that have rows of these."""
    names: tuple[str, ...]
    """Of all of them, in the model's order."""
    copied: Shape | None = None
    """Of a tied embedding, which another rank trains."""

    @property
    def all(self) -> Shapes:
        """Dense ones and those apart, in a model's order."""
        shapes = self.dense | self.apart
        return {name: shapes[name] for name in self.names}

    @property
    def kinds(self) -> tuple[object, ...]:
        """The same for ranks of one model and layout that differ in nothing but the blocks' numbers."""
        return tuple(map(in_any_block, self.dense)), tuple(map(in_any_block, self.apart)), self.copied


def rank_shapes(run: RunSpec, world_size: int, tp_rank: int = 0) -> list[Held]:
    """Of a rank at each place of the pipeline (one, without a pipeline): by default of the one with the largest shares,
    else of the one that has this place among those that share products.

    Raises UserError if the ranks cannot be divided so.
    """
    spec, layout = run.model, run.layout
    sizes = degrees(layout, world_size)
    data = sizes.as_data(sharded=layout.data in SHARDED)
    copies = sizes.dp_replicate if layout.data == "hsdp" else 1
    same = sizes.dp * sizes.cp * sizes.tp // sizes.ep // copies
    whole = parameter_shapes(spec)
    share_of = cache(partial(tensor_share, spec, layout))
    shares = {name: share_of(in_any_block(name)) for name in whole}
    shapes = {name: _share(layout, share, whole[name], tp_rank) for name, share in shares.items()}
    apart = {name for name, share in shares.items() if share.among == "ep"}
    apart_shards = same if layout.data in SHARDED else 1
    return [
        Held(
            {name: shapes[name] for name in names if name not in apart}, data.dp_shard,
            {name: shapes[name] for name in names if name in apart}, apart_shards,
            tuple(names), shapes["embedding.weight"] if copied else None,
        )
        for names, copied in _names(run, list(shapes))
    ]  # fmt: skip


def _share(layout: Layout, share: Share, shape: Shape, tp_rank: int) -> Shape:
    """Of one of the ranks that share a tensor; of those that share experts all have as many."""
    if share.axis is None:
        return shape
    parts, place = (layout.tp // share.copies, tp_rank // share.copies) if share.among == "tp" else (layout.ep, 0)
    return tuple(rows_of(place, size, parts) if axis == share.axis else size for axis, size in enumerate(shape))


def _names(run: RunSpec, names: list[str]) -> list[tuple[list[str], bool]]:
    """The tensors of each place of the pipeline, and whether it has a copy of a tied embedding beside."""
    if run.layout.pp == 1:
        return [(names, False)]
    schedule, layers = any_schedule_of(run.layout), stage_layers(run)
    first, last = schedule.ends
    ends = {"embedding": first, "positions": first, "norm": last, "head": last}
    rank_of = {str(layer): schedule.rank_of[stage] for stage, mine in enumerate(layers) for layer in mine}

    def owner(name: str) -> int:
        part, layer, *_ = name.split(".")
        return rank_of[layer] if part == "blocks" else ends[part]

    of_rank: list[list[str]] = [[] for _ in range(run.layout.pp)]
    for name in names:
        of_rank[owner(name)].append(name)
    return [(mine, run.model.tied and rank == last != first) for rank, mine in enumerate(of_rank)]
