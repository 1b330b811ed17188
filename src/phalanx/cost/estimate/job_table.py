"""Training jobs as columns: many at once, so that thousands of layouts are predicted in one pass of numpy.

A column is a number where all jobs agree and an array where they differ; every formula of `kernel_time`,
`collective_time`, `step_time` and `memory` takes either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.kinds import Column, ScheduleKind


@dataclass(frozen=True)
class JobTable:
    """Columns of equal length (or of length 1). Degrees count ranks, sizes elements, speeds are per device."""

    # The model.
    layers: Column
    dense_layers: Column
    """Of `layers`, those with a dense MLP."""
    width: Column
    heads: Column
    kv_heads: Column
    head_dim: Column
    value_dim: Column
    """Width of one head's values, where it is not the queries'."""
    attention_parameters: Column
    """Of one layer's projections."""
    ffn: Column
    mlp_matrices: Column
    """Matrices of an MLP: 3 where it is gated, else 2."""
    vocab: Column
    tied: Column
    experts: Column
    top_k: Column
    expert_ffn: Column
    shared_ffn: Column
    """Inner width of the experts that every token passes through, together."""
    parameters: Column
    """All parameters of the model."""
    expert_parameters: Column
    """Of these, routed experts'."""
    sequence: Column
    # The machine.
    peak_flops: Column
    """Dense matrix products in 16 bits."""
    matmul_flops: Column
    """The most that a matrix product in 16 bits was seen to reach."""
    low_matmul_flops: Column
    """The same in 8 bits."""
    num_sms: Column
    """Multiprocessors of a device; 0 where it is not made of them."""
    hbm_bytes_per_second: Column
    memory_bytes: Column
    link_bytes_per_second: Column
    network_bytes_per_second: Column
    oversubscription: Column
    """Network cards' bandwidth beside that of the fabric above them."""
    host_link_bytes_per_second: Column
    """Between a device and its node's CPU memory, in one direction."""
    host_bytes_per_second: Column
    """A device's share of CPU memory's bandwidth."""
    host_memory_bytes: Column
    """A device's share of CPU memory."""
    disk_bytes_per_second: Column
    fast_link_domain: Column
    """Devices joined by the fast links."""
    ranks_per_core: Column
    """Ranks that share one core, of which each has a part of its speed; 1 where each has a device of its own."""
    comm_uses_compute_cores: Column
    """Whether exchanges take the cores that compute, as on CPUs: nothing hides behind anything."""
    hardware_generation: Column
    """Generation of device and of the software that runs on it: 0 Ampere and older, 1 Hopper, 2 Blackwell."""
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
    """Ranks that share what ZeRO shards."""
    micro_batch: Column
    micro_batches: Column
    recompute: Column
    sequence_parallel: Column
    schedule: Column
    attention: Column
    low_precision: Column
    """Whether linear layers run in 8 bits."""
    compute_dtype_bytes: Column
    """Of a number that is computed with or sent between ranks that share a model."""
    parameter_bytes: Column
    """Per parameter, of the weights that a rank has."""
    gradient_bytes: Column
    """Per parameter, as gradients are kept."""
    gradient_wire_bytes: Column
    """Per parameter, as gradients are sent."""
    grad_reductions_per_step: Column
    """Times that gradients are sent in a step: once, or with every micro-batch."""
    state_bytes: Column
    """Per parameter, of what the optimizer keeps."""
    offload: Column
    """Where what it trains rests: `OffloadTarget`."""
    compiled: Column
    fused_elementwise: Column
    """Whether norms and activations run in kernels written for them, rather than operation by operation."""
    overlap_grad_reduce: Column
    """Whether data-parallel exchanges run beside the backward pass."""
    overlap_param_gather: Column
    """Whether what ZeRO-1 and 2 gather after the update runs beside the next step's forward pass."""
    overlap_tp: Column
    """Whether tensor-parallel exchanges run beside products."""
    overlap_tp_with_weight_grads: Column
    """Whether the backward pass's tensor-parallel exchanges run beside gradients of weights."""
    overlap_ep: Column
    """Whether experts' exchanges run beside another micro-batch's products."""
    ulysses: Column
    """Whether context-parallel ranks exchange tokens for heads, rather than send keys and values round."""
    ring_gradient_bytes: Column
    """Of a number of keys' and values' gradients, as ring attention sends them."""
    dedup_node_dispatch: Column
    """Whether a token crosses to a node once, however many of its experts are there."""
    tp_reductions_per_block: Column
    """Of a block's outputs, those that tensor-parallel ranks sum: 2, or 1 where attention and MLP run side by side."""
    deepspeed: Column
    """Whether DeepSpeed's engines run it."""
    scatter_gather_p2p: Column
    """Whether tensor-parallel ranks each send a part of what all of them have to the next stage."""
    gathers_logits: Column
    """Whether every tensor-parallel rank has the logits of the whole vocabulary."""
    optimizer_post_validation: Column
    """Whether the optimizer's checks of all gradients are made after the step, and it is taken back if they fail."""
    first_blocks: Column
    """Of the first rank of a pipeline; without one all."""
    middle_blocks: Column
    """Of the rank between whose blocks cost most."""
    last_blocks: Column
    """Of the last, or of the one that has the head."""
    first_moe_blocks: Column
    """Of `first_blocks`, those with experts."""
    middle_moe_blocks: Column
    last_moe_blocks: Column
    pipeline_outermost: Column
    """Whether a pipeline's stages are furthest apart, and not data-parallel ranks."""

    @property
    def count(self) -> int:
        """How many jobs there are."""
        return max(len(getattr(self, column.name)) for column in fields(self))

    @property
    def tokens(self) -> Column:
        """Of a micro-batch, those that one context-parallel rank holds."""
        return self.micro_batch * self.sequence / self.cp

    @property
    def expert_replicas(self) -> Column:
        """Ranks of a stage that hold the same of experts: their gradients are exchanged among these."""
        return np.maximum(self.dp * self.cp * self.tp / self.expert_shards, 1)

    @property
    def expert_shards(self) -> Column:
        """Ranks that each hold a part of a block's experts: whole ones, or without expert parallelism a part of each,
        cut as tensor parallelism cuts MLPs."""
        return np.where(self.ep > 1, self.ep, self.tp)

    @cached_property
    def fast_link_ranks_per_stage(self) -> Column:
        """Of a stage's ranks, those that share a domain: all in it, or what a pipeline's other stages leave of it."""
        shared = np.minimum(self.tp * self.cp, self.fast_link_domain)
        return np.where(
            self.pipeline_outermost > 0, self.fast_link_domain, np.maximum(self.fast_link_domain / self.pp, shared)
        )

    @property
    def embedding_and_head_share_rank(self) -> NDArray[np.bool_]:
        """Whether one rank has both embedding and head: without a pipeline, and where it is a V."""
        shares_rank: NDArray[np.bool_] = (self.pp == 1) | (self.schedule == ScheduleKind.ZB_V)
        return shares_rank

    @property
    def has_middle_stages(self) -> NDArray[np.bool_]:
        """Whether a pipeline has ranks with neither embedding nor head."""
        has_middle: NDArray[np.bool_] = self.pp > np.where(self.embedding_and_head_share_rank, 1, 2)
        return has_middle

    def select(self, selection: NDArray[np.int64] | NDArray[np.bool_]) -> JobTable:
        """Some of them, by index or by mask."""
        num_jobs = self.count
        return JobTable(**{f.name: np.broadcast_to(getattr(self, f.name), num_jobs)[selection] for f in fields(self)})


def job_table(rows: Sequence[Mapping[str, float]]) -> JobTable:
    """Jobs from rows of numbers by column."""
    return JobTable(**{f.name: np.array([row[f.name] for row in rows], dtype=np.float64) for f in fields(JobTable)})


def broadcast_jobs(common: Mapping[str, float], varying: Mapping[str, Column]) -> JobTable:
    """Jobs that agree in `common` and differ in `varying`."""
    return JobTable(**{name: np.array([value], dtype=np.float64) for name, value in common.items()}, **varying)
