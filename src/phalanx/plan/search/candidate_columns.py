"""Conversion of candidate layouts to a job table: one column per field, one row per candidate."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from operator import attrgetter

import numpy as np
from numpy.typing import ArrayLike

from phalanx.cost.estimate.job_table import JobTable, broadcast_jobs
from phalanx.cost.exact.model_state import NUM_OPTIMIZER_STATES, StateBytes, optimizer_kind, sharded_state_bytes
from phalanx.cost.exact.pipeline_split import layer_flops, layers_per_rank
from phalanx.cost.formulas.collectives import Strategy
from phalanx.cost.kinds import PHALANX_CHECKPOINTING, AttentionKernel, OffloadTarget, ScheduleKind
from phalanx.cost.precision import COMPUTE_BYTES, STATE_BYTES
from phalanx.plan.search.candidates import SCHEDULE_KINDS, ZERO_STAGES, CandidateLayout
from phalanx.plan.tables.job_columns import JobRow, model_columns
from phalanx.plan.tables.machine_columns import machine_columns
from phalanx.schedule.registry import representative_schedule
from phalanx.spec.batch import needs_all_logits
from phalanx.spec.layout import compiles_whole_blocks
from phalanx.spec.parallel_dims import replica_strategy
from phalanx.spec.run import RunSpec

OFFLOAD_TARGETS = {"none": OffloadTarget.NONE, "cpu": OffloadTarget.CPU, "nvme": OffloadTarget.FILES}


STAGE_POSITIONS = ("first", "middle", "last")


@dataclass(frozen=True, kw_only=True)
class _StageBlocks:
    """Blocks of the first, the middle and the last pipeline rank, in this order.

    The middle rank is the one with the most expensive blocks. The last rank is the one with the head.
    """

    counts: list[int]
    moe_counts: list[int]
    recomputed: list[float]
    """Fraction of the blocks that recompute activations, if any do."""
    mean_recomputed: float
    """The same of all blocks of the model."""
    splits_backward: bool
    """True if the schedule splits backward passes."""


def candidate_jobs(run: RunSpec, world_size: int, layouts: list[CandidateLayout]) -> JobTable:
    """Return the job table of candidate layouts under Phalanx.

    Args:
        run: Run with the model, the batch and the cluster; its own layout is not used.
        world_size: Number of ranks.
        layouts: One candidate per row of the table.
    """
    common = {**_shared_columns(run, world_size), "ranks": world_size}
    return broadcast_jobs(common, {name: np.array(values) for name, values in _layout_columns(run, layouts).items()})


def _shared_columns(run: RunSpec, world_size: int) -> JobRow:
    """Return the columns that are common to all layouts of a run: model, machine and trainer."""
    return {
        **model_columns(run.model, run.training.seq_len),
        **machine_columns(run.cluster, world_size),
        "low_precision": float(run.training.precision == "fp8"),
        "casts_to_fp8": float(run.training.precision == "fp8"),
        "compute_dtype_bytes": COMPUTE_BYTES[run.training.precision],
        "lean_activations": 1,
        "chunks_loss": float(not needs_all_logits(run)),
        "overlap_grad_reduce": 1,
        "overlap_param_gather": 0,
        "overlap_tp": 0,
        "overlap_tp_with_weight_grads": 1,
        "overlap_ep": 0,
        "ring_gradient_bytes": STATE_BYTES[run.training.precision],
        "dedup_node_dispatch": 0,
        "tp_reductions_per_block": 2,
        "deepspeed": 0,
        "scatter_gather_p2p": 0,
        "gathers_logits": 0,
        "optimizer_post_validation": 0,
    }


def _layout_columns(run: RunSpec, layouts: list[CandidateLayout]) -> Mapping[str, ArrayLike]:
    """Return the columns in which layouts differ."""
    states = NUM_OPTIMIZER_STATES[optimizer_kind(run.optimizer)]

    @cache
    def per_parameter(strategy: Strategy, micro_batches: int) -> StateBytes:
        return sharded_state_bytes(
            strategy, run.training.precision, 1, owned=1, states=states, micro_batches=micro_batches
        )

    strategies = [
        replica_strategy(c.data_parallel, run.training.precision, dp_size=c.dp * c.cp, ep=c.ep) for c in layouts
    ]
    state = [per_parameter(strategy, c.micro_batches) for strategy, c in zip(strategies, layouts, strict=True)]
    pipelines = list(map(_pipeline, layouts))
    example_of = dict(zip(pipelines, layouts, strict=True))  # thousands of layouts have a few cuts into stages
    cuts = [_stage_block_kinds(run, c) for c in example_of.values()]
    index_of = {pipeline: index for index, pipeline in enumerate(example_of)}
    cut = np.array([index_of[pipeline] for pipeline in pipelines], dtype=int)
    whole_blocks = np.array(
        [
            compiles_whole_blocks(c.tp * c.cp * c.ep, cuts[index].splits_backward)
            for c, index in zip(layouts, cut, strict=True)
        ],
        dtype=bool,
    )
    return {
        **{name: list(map(attrgetter(name), layouts)) for name in ("dp", "tp", "pp", "cp", "ep")},
        "micro_batch": [c.micro_batch_size for c in layouts],
        "micro_batches": [c.micro_batches for c in layouts],
        "virtual_stages": [c.virtual_stages for c in layouts],
        "attention": _attention_kernels(run, layouts),
        "ulysses": [float(c.cp > 1 and c.cp_method == "ulysses") for c in layouts],
        "zero_stage": [ZERO_STAGES[c.data_parallel] for c in layouts],
        "shard_group_size": [1 if c.data_parallel == "ddp" else c.dp_shard * c.cp for c in layouts],
        "recompute": [PHALANX_CHECKPOINTING[c.activation_checkpointing] for c in layouts],
        "sequence_parallel": [float(c.tp > 1) for c in layouts],
        "schedule": [SCHEDULE_KINDS[c.schedule] if c.pp > 1 else ScheduleKind.NONE for c in layouts],
        "parameter_bytes": [s.parameters for s in state],
        "gradient_bytes": [s.gradients for s in state],
        "state_bytes": [s.optimizer for s in state],
        "gradient_wire_bytes": [per_parameter(c.data_parallel, 1).gradients for c in layouts],
        **{
            f"{position}_{column}": np.array([getattr(stage_blocks, field)[index] for stage_blocks in cuts])[cut]
            for index, position in enumerate(STAGE_POSITIONS)
            for column, field in (("blocks", "counts"), ("moe_blocks", "moe_counts"), ("recomputed", "recomputed"))
        },
        "compiled": whole_blocks * float(run.compiles),
        # Norms have kernels of their own, and activations are compiled.
        "fused_elementwise": ~whole_blocks * float(run.compiles),
        "mean_recomputed": np.array([stage_blocks.mean_recomputed for stage_blocks in cuts])[cut],
        "pipeline_outermost": [float(c.rank_order == "pipeline_outer") for c in layouts],
        "offload": [OFFLOAD_TARGETS[c.offload] for c in layouts],
        "grad_reductions_per_step": [c.micro_batches if c.data_parallel == "zero2" else 1 for c in layouts],
    }


def _pipeline(candidate: CandidateLayout) -> Hashable:
    """Return the choices on which the blocks of a pipeline's ranks depend."""
    return candidate.pp, candidate.schedule, candidate.virtual_stages, candidate.recomputed_blocks


def _stage_block_kinds(run: RunSpec, candidate: CandidateLayout) -> _StageBlocks:
    candidate_run = run.model_copy(update={"layout": candidate.layout()})
    ranks = layers_per_rank(candidate_run)
    schedule = representative_schedule(candidate_run.layout)
    first, last = schedule.end_ranks
    costs = layer_flops(run.model, run.training.seq_len)[1:-1]
    again = _recomputed_counts(candidate, [len(layers) for layers in ranks])

    def rank_cost(rank: int) -> float:
        forward_factor = 1 + again[rank] / len(ranks[rank]) / 3
        return forward_factor * sum(costs[layer] for layer in ranks[rank])

    between = [rank for rank in range(len(ranks)) if rank not in (first, last)]
    middle = max(between or range(len(ranks)), key=rank_cost)
    positions = (first, middle, last)
    return _StageBlocks(
        counts=[len(ranks[rank]) for rank in positions],
        moe_counts=[sum(map(run.model.is_moe_layer, ranks[rank])) for rank in positions],
        recomputed=[again[rank] / len(ranks[rank]) for rank in positions],
        mean_recomputed=sum(again) / run.model.num_layers,
        splits_backward=schedule.splits_backward,
    )


def _recomputed_counts(candidate: CandidateLayout, blocks: list[int]) -> list[int]:
    """Return the number of recomputed blocks per rank; all without `recomputed_blocks`, whatever the method."""
    limits = candidate.recomputed_blocks
    if limits is None:
        return blocks
    per_rank = limits if isinstance(limits, tuple) else [limits] * len(blocks)
    return [min(limit, count) for limit, count in zip(per_rank, blocks, strict=True)]


def _attention_kernels(run: RunSpec, layouts: list[CandidateLayout]) -> list[AttentionKernel]:
    usual = AttentionKernel.FLASH_3 if run.cluster.generation > 0 else AttentionKernel.FLASH_2
    in_ring = usual if run.cluster.uses_cpu else AttentionKernel.RING
    return [in_ring if c.cp > 1 and c.cp_method == "ring" else usual for c in layouts]
