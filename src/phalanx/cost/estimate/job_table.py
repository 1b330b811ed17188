"""Training jobs as columns, so that one pass of numpy predicts thousands of layouts.

A column has one element where all jobs agree, and one per job where they differ. Every formula of `kernel_time`,
`collective_time`, `step_time` and `memory` accepts both.

Why: `docs/design/decisions/one-time-model.md`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.kinds import Column, ScheduleKind
from phalanx.spec.chunks import LOGITS_CHUNK_BYTES


@dataclass(frozen=True, kw_only=True)
class JobTable:
    """Columns of equal length, or of length 1.

    Degrees count ranks, sizes count elements, and speeds are per device. Flags are 1 or 0.
    """

    # The model.
    layers: Column
    dense_layers: Column
    """Number of `layers` with a dense MLP."""
    width: Column
    heads: Column
    kv_heads: Column
    head_dim: Column
    value_dim: Column
    """Width of one head's values; differs from `head_dim` in some models."""
    attention_parameters: Column
    """Parameters of one layer's attention projections."""
    ffn: Column
    mlp_matrices: Column
    """Matrices of an MLP: 3 if it is gated, else 2."""
    vocab: Column
    tied: Column
    experts: Column
    top_k: Column
    expert_ffn: Column
    shared_ffn: Column
    """Total inner width of the shared experts, which process every token."""
    parameters: Column
    """All parameters of the model."""
    expert_parameters: Column
    """Number of `parameters` in routed experts."""
    sequence: Column
    attended_fraction: Column
    """Fraction of the causal pairs of queries and keys that sliding windows leave; 1 without windows."""
    # The machine.
    peak_flops: Column
    """Peak of dense matrix products in 16 bits."""
    matmul_flops: Column
    """Maximum measured FLOP/s of matrix products in 16 bits."""
    low_matmul_flops: Column
    """Maximum measured FLOP/s of matrix products in 8 bits."""
    num_sms: Column
    """Multiprocessors of a device; 0 for devices without them."""
    hbm_bytes_per_second: Column
    memory_bytes: Column
    link_bytes_per_second: Column
    network_bytes_per_second: Column
    oversubscription: Column
    """Bandwidth of the network cards / bandwidth of the fabric above them."""
    host_link_bytes_per_second: Column
    """Bandwidth between a device and its node's CPU memory, per direction."""
    host_bytes_per_second: Column
    """A device's share of CPU memory bandwidth."""
    host_memory_bytes: Column
    """A device's share of CPU memory."""
    disk_bytes_per_second: Column
    fast_link_domain: Column
    """Number of devices that fast links connect."""
    ranks_per_core: Column
    """Ranks that share the speed of one core; 1 if each rank has its own device."""
    comm_uses_compute_cores: Column
    """Flag: communication uses the compute cores, as on CPUs, so that nothing overlaps."""
    hardware_generation: Column
    """Generation of the device and its software: 0 Ampere and older, 1 Hopper, 2 Blackwell."""
    # The layout.
    ranks: Column
    dp: Column
    tp: Column
    pp: Column
    virtual_stages: Column
    cp: Column
    ep: Column
    zero_stage: Column
    shard_group_size: Column
    """Ranks over which ZeRO shards."""
    micro_batch: Column
    micro_batches: Column
    recompute: Column
    sequence_parallel: Column
    schedule: Column
    attention: Column
    low_precision: Column
    """Flag: linear layers run in 8 bits."""
    casts_to_fp8: Column
    """Flag: as in Phalanx, operands are cast before each product in 8 bits, and weight gradients are in 16 bits."""
    compute_dtype_bytes: Column
    """Bytes per number for compute and for model-parallel communication."""
    parameter_bytes: Column
    """Bytes per parameter of a rank's weights."""
    gradient_bytes: Column
    """Bytes per parameter of gradients in memory."""
    gradient_wire_bytes: Column
    """Bytes per parameter of gradients on the wire."""
    grad_reductions_per_step: Column
    """Gradient reductions per step: one, or one per micro-batch."""
    state_bytes: Column
    """Bytes per parameter of the optimizer state."""
    offload: Column
    """Storage of the training state: `OffloadTarget`."""
    compiled: Column
    fused_elementwise: Column
    """Flag: norms and activations run in fused kernels, rather than operation by operation."""
    lean_activations: Column
    """Flag: as in Phalanx, activations are recomputed, and the gradient of the loss replaces the logits."""
    chunks_loss: Column
    """Flag: as in Phalanx, head and loss are computed in chunks of at most `LOGITS_CHUNK_BYTES` of logits."""
    overlap_grad_reduce: Column
    """Flag: data-parallel communication overlaps with the backward pass."""
    overlap_param_gather: Column
    """Flag: the parameter all-gather of ZeRO-1 and 2 overlaps with the next step's forward pass."""
    overlap_tp: Column
    """Flag: tensor-parallel communication overlaps with matrix products."""
    overlap_tp_with_weight_grads: Column
    """Flag: tensor-parallel communication in backward overlaps with gradients of weights."""
    overlap_ep: Column
    """Flag: expert-parallel communication overlaps with another micro-batch's products."""
    ulysses: Column
    """Flag: context-parallel ranks exchange tokens for heads, rather than send keys and values in a ring."""
    ring_gradient_bytes: Column
    """Bytes per number of the gradients of keys and values, as ring attention sends them."""
    dedup_node_dispatch: Column
    """Flag: a token crosses to a node once, however many of its experts are there."""
    tp_reductions_per_block: Column
    """Block outputs that tensor-parallel ranks sum: 2, or 1 if attention and MLP run in parallel."""
    deepspeed: Column
    """Flag: DeepSpeed's engines run the job."""
    scatter_gather_p2p: Column
    """Flag: each tensor-parallel rank sends a part of their common tensor to the next stage."""
    gathers_logits: Column
    """Flag: every tensor-parallel rank has the logits of the full vocabulary."""
    optimizer_post_validation: Column
    """Flag: the optimizer checks all gradients after the step, and reverts the step if a check fails."""
    first_blocks: Column
    """Blocks of the first rank of a pipeline; all blocks without a pipeline."""
    middle_blocks: Column
    """Blocks of the middle rank whose blocks cost most."""
    last_blocks: Column
    """Blocks of the last rank, or of the rank that has the head."""
    first_moe_blocks: Column
    """Number of `first_blocks` with experts."""
    middle_moe_blocks: Column
    last_moe_blocks: Column
    first_recomputed: Column
    """Fraction of the first rank's blocks, its first ones, that recompute activations by the method `recompute`."""
    middle_recomputed: Column
    last_recomputed: Column
    mean_recomputed: Column
    """Fraction of all blocks that recompute activations."""
    pipeline_outermost: Column
    """Flag: the pipeline is the outermost dimension of the rank order, rather than data parallelism."""

    @property
    def count(self) -> int:
        """Number of jobs."""
        return max(len(getattr(self, column.name)) for column in fields(self))

    @cached_property
    def tokens(self) -> Column:
        """Tokens of a micro-batch on one context-parallel rank."""
        return self.micro_batch * self.sequence / self.cp

    @cached_property
    def loss_chunks(self) -> Column:
        """Number of chunks in which head and loss are computed."""
        logits_bytes = self.compute_dtype_bytes * self.tokens * self.vocab / self.tp
        return np.where(self.chunks_loss > 0, np.maximum(1, np.ceil(logits_bytes / LOGITS_CHUNK_BYTES)), 1.0)

    @cached_property
    def expert_replicas(self) -> Column:
        """Ranks of a stage with the same experts, among which the gradients of these experts are reduced."""
        return np.maximum(self.dp * self.cp * self.tp / self.expert_shards, 1)

    @cached_property
    def expert_shards(self) -> Column:
        """Ranks over which a block's experts are sharded.

        With expert parallelism each rank has full experts. Without it each rank has a tensor-parallel shard of every
        expert, as of a dense MLP.
        """
        return np.where(self.ep > 1, self.ep, self.tp)

    @cached_property
    def fast_link_ranks_per_stage(self) -> Column:
        """Number of ranks of a stage that share a fast-link domain.

        It is the full domain, or the part of it that the pipeline's other stages do not use.
        """
        shared = np.minimum(self.tp * self.cp, self.fast_link_domain)
        return np.where(
            self.pipeline_outermost > 0, self.fast_link_domain, np.maximum(self.fast_link_domain / self.pp, shared)
        )

    @property
    def embedding_and_head_share_rank(self) -> NDArray[np.bool_]:
        """Rows in which one rank has both embedding and head: without a pipeline, and in V schedules."""
        shares_rank: NDArray[np.bool_] = (self.pp == 1) | (self.schedule == ScheduleKind.ZB_V)
        return shares_rank

    @property
    def has_middle_stages(self) -> NDArray[np.bool_]:
        """Rows in which a pipeline has ranks with neither embedding nor head."""
        has_middle: NDArray[np.bool_] = self.pp > np.where(self.embedding_and_head_share_rank, 1, 2)
        return has_middle

    def select(self, selection: NDArray[np.int64] | NDArray[np.bool_]) -> JobTable:
        """Return the selected jobs, by index or by mask."""
        num_jobs = self.count
        return JobTable(**{f.name: np.broadcast_to(getattr(self, f.name), num_jobs)[selection] for f in fields(self)})


def job_table(rows: Sequence[Mapping[str, float]]) -> JobTable:
    """Return a table of jobs from one mapping per job, of column to number."""
    return JobTable(**{f.name: np.array([row[f.name] for row in rows], dtype=np.float64) for f in fields(JobTable)})


def broadcast_jobs(common: Mapping[str, float], varying: Mapping[str, Column]) -> JobTable:
    """Return a table of jobs that agree in `common` and differ in `varying`."""
    return JobTable(**{name: np.array([value], dtype=np.float64) for name, value in common.items()}, **varying)
