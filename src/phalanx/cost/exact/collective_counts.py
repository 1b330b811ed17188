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
    """Collectives of all buckets (ddp, ZeRO-1 and 2), or gathers of the wrapped units for each pass (ZeRO-3)."""
    outside_blocks: int = 0
    """Gathers of ZeRO-3's other units: of embedding and head, or of a root that has both."""
    forward_only: int = 0
    """Gathers of wrapped units without a backward pass."""
    reductions: int = 0
    """Reductions of the wrapped units that have trained parameters."""
    outside_reductions: int = 0
    """Reductions of the other units that do."""


def count_collectives(resolved: ResolvedRun, rank: RankTensors, for_experts: bool = False) -> CollectiveCounts:
    """Return the number of collectives for a rank's dense parameters, or for its experts with ranks of their own."""
    layout = resolved.layout
    precision = resolved.run.training.precision
    shapes = rank.expert if for_experts else rank.dense
    trained = rank.without_frozen(shapes)
    if not shapes:
        return CollectiveCounts(0)
    match resolved.strategy:
        case "ddp" if for_experts:
            return CollectiveCounts(int(bool(trained)))
        case "ddp" if layout.pp > 1:
            sizes = (STATE_BYTES[precision] * num_elements(shape) for shape in trained.values())
            return CollectiveCounts(len(pipeline_gradient_buckets(sizes, layout, nbytes=int)))
        case "ddp":
            return CollectiveCounts(len(ddp_bucket_names(trained, layout, STATE_BYTES[precision])))
        case "zero1" | "zero2":
            buckets = zero_bucket_names(rank, layout, COMPUTE_BYTES[precision])
            return CollectiveCounts(sum((bucket[0] in rank.expert) == for_experts for bucket in buckets))
        case _:
            units = [unit for unit in fsdp_units(rank, layout) if any(name in shapes for name in unit.shapes)]
            in_blocks = [unit for unit in units if unit.is_in_blocks]
            outside = [unit for unit in units if not unit.is_in_blocks]
            num_forward_only = sum(not unit.has_backward for unit in in_blocks)
            return CollectiveCounts(
                blocks=len(in_blocks) - num_forward_only,
                outside_blocks=len(outside),
                forward_only=num_forward_only,
                reductions=sum(bool(unit.trained) for unit in in_blocks),
                outside_reductions=sum(bool(unit.trained) for unit in outside),
            )
