"""In how many collectives data-parallel ranks send a model's parameters and gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from phalanx.cost.buffers import MIB, bucket_names, unit_of
from phalanx.cost.memory import runs_as
from phalanx.cost.precision import COMPUTED, KEPT
from phalanx.cost.shapes import elements
from phalanx.cost.shares import Held
from phalanx.spec.run import RunSpec


class Calls(NamedTuple):
    """Each sums, gathers or scatters a part of the model once."""

    blocks: int
    """Of ddp, ZeRO-1 and 2 of all buckets; of ZeRO-3 of what is wrapped."""
    root: int = 0
    """Of ZeRO-3's root, which has what nobody wrapped."""


def calls(run: RunSpec, rank: Held, shards: int, apart: bool = False) -> Calls:
    """For what is dense on a rank, or for the experts that are apart; `shards` ranks share the former."""
    layout, names = run.layout, rank.apart if apart else rank.dense
    if not names:
        return Calls(0)
    match runs_as(layout, shards):
        case "ddp" if apart:
            return Calls(1)
        case "ddp" if layout.pp > 1:
            sizes = (KEPT[run.training.precision] * elements(shape) for shape in rank.dense.values())
            return Calls(_pieces(sizes, int(layout.bucket_mb * MIB)))
        case "ddp":
            return Calls(_ddp(run, rank))
        case "zero1" | "zero2":
            limit = layout.bucket_mb * MIB / COMPUTED[run.training.precision]
            cut = bucket_names(rank.all, limit, rank.apart)
            return Calls(sum((bucket[0] in rank.apart) == apart for bucket in cut))
        case "zero3" | "hsdp" if apart:
            return Calls(len({name.rpartition(".")[0] for name in names}))
        case _:
            units = {unit_of(name, layout) for name in names}
            return Calls(len(units - {""}), int("" in units))


def _pieces(sizes: Iterable[int], limit: int) -> int:
    """Neighbours of together up to `limit` bytes; what is larger stands alone (`parallel.strategy.pieces_of`)."""
    count, filled = 0, limit + 1
    for size in sizes:
        if filled + size > limit:
            count, filled = count + 1, 0
        filled += size
    return count


def _ddp(run: RunSpec, rank: Held) -> int:
    """DDP's buckets: full when they have reached a limit, in the order in which gradients come, the reverse of the
    model's (torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size)."""
    layout, number = run.layout, KEPT[run.training.precision]
    others = int(layout.bucket_mb * MIB)
    count, filled, limit = 0, 0, others if layout.first_bucket_mb is None else int(layout.first_bucket_mb * MIB)
    for shape in reversed(rank.dense.values()):
        filled += number * elements(shape)
        if filled >= limit:
            count, filled, limit = count + 1, 0, others
    return count + (filled > 0)
