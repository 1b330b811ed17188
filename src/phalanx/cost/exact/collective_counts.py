"""Number of collectives in which data-parallel ranks send a model's parameters and gradients."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.cost.precision import COMPUTE_BYTES, STATE_BYTES
from phalanx.program.buckets import ddp_bucket_names, pipeline_gradient_buckets, zero_bucket_names
from phalanx.program.fsdp_units import fsdp_units
from phalanx.program.rank_tensors import RankTensors
from phalanx.spec.parameter_shapes import num_elements
from phalanx.spec.resolved_run import ResolvedRun


class CollectiveCounts(NamedTuple):
    """Number of collectives that each reduce, gather or scatter a part of the model once."""

    blocks: int
    """Collectives of all buckets (ddp, ZeRO-1 and 2), or of the wrapped units (ZeRO-3)."""
    outside_blocks: int = 0
    """Collectives of ZeRO-3's other units: of embedding and head, or of a root that has both."""


def count_collectives(resolved: ResolvedRun, rank: RankTensors, for_experts: bool = False) -> CollectiveCounts:
    """Return the number of collectives for a rank's dense parameters, or for its experts with ranks of their own."""
    layout = resolved.layout
    precision = resolved.run.training.precision
    names = rank.expert if for_experts else rank.dense
    if not names:
        return CollectiveCounts(0)
    match resolved.strategy:
        case "ddp" if for_experts:
            return CollectiveCounts(1)
        case "ddp" if layout.pp > 1:
            sizes = (STATE_BYTES[precision] * num_elements(shape) for shape in rank.dense.values())
            return CollectiveCounts(len(pipeline_gradient_buckets(sizes, layout, nbytes=int)))
        case "ddp":
            return CollectiveCounts(len(ddp_bucket_names(rank.dense, layout, STATE_BYTES[precision])))
        case "zero1" | "zero2":
            buckets = zero_bucket_names(rank, layout, COMPUTE_BYTES[precision])
            return CollectiveCounts(sum((bucket[0] in rank.expert) == for_experts for bucket in buckets))
        case _:
            units = [unit for unit in fsdp_units(rank, layout) if any(name in names for name in unit.shapes)]
            num_in_blocks = sum(unit.is_in_blocks for unit in units)
            return CollectiveCounts(num_in_blocks, len(units) - num_in_blocks)
