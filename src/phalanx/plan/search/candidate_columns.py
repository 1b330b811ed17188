"""Conversion of candidate layouts to a job table: one column per field, one row per candidate."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import inf
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.estimate.job_table import JobRow, JobTable, broadcast_jobs
from phalanx.cost.exact.model_state import NUM_OPTIMIZER_STATES, StateBytes, optimizer_kind, sharded_state_bytes
from phalanx.cost.formulas.collectives import Strategy
from phalanx.cost.kinds import AttentionKernel
from phalanx.cost.precision import COMPUTE_BYTES
from phalanx.plan.search.candidates import ZERO_STAGES, CandidateLayout
from phalanx.plan.tables.job_columns import model_columns
from phalanx.plan.tables.machine_columns import machine_columns
from phalanx.program.pipeline_split import block_flops, layers_per_rank
from phalanx.schedule.registry import representative_schedule
from phalanx.spec.batch import needs_all_logits
from phalanx.spec.chunks import LOGITS_CHUNK_BYTES
from phalanx.spec.files.teacher import resolved_teacher
from phalanx.spec.layers import expert_layers
from phalanx.spec.layout import compiles_whole_blocks
from phalanx.spec.parallel_dims import replica_strategy
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec


def candidate_jobs(resolved: ResolvedRun, layouts: list[CandidateLayout]) -> JobTable:
    """Return the job table of candidate layouts under Phalanx; the run's own layout is not used."""
    run = resolved.run
    precision = run.training.precision
    common: JobRow = {
        **model_columns(run.model, run.training.seq_len),
        **machine_columns(run.cluster, resolved.world_size),
        "trainer": "Phalanx",
        "low_precision": float(precision == "fp8"),
        "compute_dtype_bytes": COMPUTE_BYTES[precision],
        "loss_chunk_bytes": inf if needs_all_logits(run) else LOGITS_CHUNK_BYTES,
        "overlap_grad_reduce": 1,
        "overlap_tp": 0,
        "overlap_tp_with_weight_grads": 1,
        "overlap_ep": 0,
        "dedup_node_dispatch": 0,
        "tp_reductions_per_block": 2,
        "scatter_gather_p2p": 0,
        "gathers_logits": 0,
        "optimizer_post_validation": 0,
    }
    usual_attention = AttentionKernel.FLASH_3 if run.cluster.generation > 0 else AttentionKernel.FLASH_2
    ring_attention = usual_attention if run.cluster.uses_cpu else AttentionKernel.RING
    same_names = ("dp", "tp", "pp", "cp", "ep", "micro_batches", "virtual_stages", "offload")
    varying: dict[str, Any] = {
        **{name: list(map(attrgetter(name), layouts)) for name in same_names},
        "micro_batch": [c.micro_batch_size for c in layouts],
        "attention": [ring_attention if c.cp > 1 and c.cp_method == "ring" else usual_attention for c in layouts],
        "ulysses": [c.cp > 1 and c.cp_method == "ulysses" for c in layouts],
        "zero_stage": [ZERO_STAGES[c.data_parallel] for c in layouts],
        "shard_group_size": [1 if c.data_parallel == "ddp" else c.dp_shard * c.cp for c in layouts],
        "recompute": [c.activation_checkpointing for c in layouts],
        "sequence_parallel": [c.tp > 1 for c in layouts],
        "schedule": [c.schedule if c.pp > 1 else "none" for c in layouts],
        "pipeline_outermost": [c.rank_order == "pipeline_outer" for c in layouts],
        **_state_columns(run, layouts),
        **_stage_columns(run, layouts),
    }
    return broadcast_jobs(common, varying)


def teacher_jobs(resolved: ResolvedRun, layouts: list[CandidateLayout]) -> JobTable | None:
    """Return the jobs of the teacher of a run with distillation, as if it had no pipelines; None without."""
    teacher = resolved_teacher(resolved)
    if teacher is None:
        return None
    whole = [
        layout._replace(
            pp=1,
            schedule="1f1b",
            virtual_stages=1,
            ep=1,
            activation_checkpointing="none",
            recomputed_blocks=None,
            offload="none",
        )
        for layout in layouts
    ]
    return candidate_jobs(teacher, whole)


def _state_columns(run: RunSpec, layouts: list[CandidateLayout]) -> dict[str, list[float]]:
    """Return the bytes of parameters, gradients and optimizer state."""
    precision = run.training.precision
    states = NUM_OPTIMIZER_STATES[optimizer_kind(run.optimizer)]

    @cache
    def per_parameter(strategy: Strategy, micro_batches: int) -> StateBytes:
        return sharded_state_bytes(strategy, precision, 1, owned=1, states=states, micro_batches=micro_batches)

    state = [
        per_parameter(replica_strategy(c.data_parallel, precision, c.dp * c.cp * c.ep), c.micro_batches)
        for c in layouts
    ]
    return {
        "parameter_bytes": [s.parameters for s in state],
        "gradient_bytes": [s.gradients for s in state],
        "state_bytes": [s.optimizer for s in state],
        "gradient_wire_bytes": [per_parameter(c.data_parallel, 1).gradients for c in layouts],
    }


def _stage_columns(run: RunSpec, layouts: list[CandidateLayout]) -> dict[str, NDArray[Any]]:
    """Return the blocks of a pipeline's ranks: thousands of layouts have a few divisions into stages."""
    division_by_layout = [(c.pp, c.schedule, c.virtual_stages, c.recomputed_blocks) for c in layouts]
    example_of = dict(zip(division_by_layout, layouts, strict=True))
    blocks_by_division = [_count_stage_blocks(run, c) for c in example_of.values()]
    index_of = {division: index for index, division in enumerate(example_of)}
    indices = np.array([index_of[division] for division in division_by_layout], dtype=int)
    splits_backward = [blocks_by_division[index].splits_backward for index in indices]
    whole_blocks = np.array(
        [compiles_whole_blocks(c.tp * c.cp * c.ep, splits) for c, splits in zip(layouts, splits_backward, strict=True)],
        dtype=bool,
    )
    return {
        "compiled": whole_blocks * float(run.compiles),
        # Norms have kernels of their own, and activations are compiled.
        "fused_elementwise": ~whole_blocks * float(run.compiles),
        **{
            name: np.array([getattr(blocks, name) for blocks in blocks_by_division])[indices]
            for name in ("blocks", "moe_blocks", "recomputed", "mean_recomputed")
        },
    }


@dataclass(frozen=True, kw_only=True)
class _StageBlocks:
    """Blocks of the first, the middle and the last pipeline rank, in this order, as in `JobTable`."""

    blocks: list[int]
    moe_blocks: list[int]
    recomputed: list[float]
    mean_recomputed: float
    splits_backward: bool
    """True if the schedule splits backward passes."""


def _count_stage_blocks(run: RunSpec, candidate: CandidateLayout) -> _StageBlocks:
    candidate_run = run.model_copy(update={"layout": candidate.layout()})
    layers_by_rank = layers_per_rank(candidate_run)
    schedule = representative_schedule(candidate_run.layout)
    first, last = schedule.end_ranks
    costs = block_flops(run.model, run.training.seq_len)
    # All blocks without `recomputed_blocks`, whatever the method.
    recomputed_blocks = candidate.recomputed_blocks
    per_rank = recomputed_blocks if isinstance(recomputed_blocks, tuple) else [recomputed_blocks] * len(layers_by_rank)
    recomputed = [
        len(layers) if limit is None else min(limit, len(layers))
        for limit, layers in zip(per_rank, layers_by_rank, strict=True)
    ]

    def rank_cost(rank: int) -> float:
        forward_factor = 1 + recomputed[rank] / len(layers_by_rank[rank]) / 3
        return forward_factor * sum(costs[layer] for layer in layers_by_rank[rank])

    middle_ranks = [rank for rank in range(len(layers_by_rank)) if rank not in (first, last)]
    middle = max(middle_ranks or range(len(layers_by_rank)), key=rank_cost)
    positions = (first, middle, last)
    with_experts = set(expert_layers(run.model))
    return _StageBlocks(
        blocks=[len(layers_by_rank[rank]) for rank in positions],
        moe_blocks=[len(with_experts.intersection(layers_by_rank[rank])) for rank in positions],
        recomputed=[recomputed[rank] / len(layers_by_rank[rank]) for rank in positions],
        mean_recomputed=sum(recomputed) / run.model.num_blocks,
        splits_backward=schedule.splits_backward,
    )
