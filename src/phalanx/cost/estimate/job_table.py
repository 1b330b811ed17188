"""Training jobs as columns, so that one pass of numpy predicts thousands of layouts.

A column has one element where all jobs agree, and one per job where they differ. Every formula of `kernel_time`,
`collective_time`, `step_time` and `memory` accepts both.

Why: `docs/design/decisions/one-time-model.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.kinds import CODES, AttentionKernel, Column
from phalanx.cost.precision import master_weight_bytes
from phalanx.spec.pipeline_schedules import V_SCHEDULES

PER_KIND = (
    "kind_share",
    "kind_dense_share",
    "kind_routed_share",
    "heads",
    "kv_heads",
    "head_dim",
    "value_dim",
    "attention_parameters",
    "ffn",
    "attended_fraction",
)
"""Columns in which kinds of layers may differ."""


@dataclass(frozen=True, kw_only=True)
class JobTable:
    """Columns of equal length, or of length 1.

    Degrees count ranks, sizes count elements, and speeds are per device. Flags are 1 or 0, and choices are `CODES`.
    """

    # The model. Columns of `PER_KIND` are [kinds, jobs] in a model with layers of several kinds (`by_kind`).
    kind_share: Column
    """Fraction of the layers that are of a kind."""
    kind_dense_share: Column
    """Fraction of the layers with a dense MLP that are of a kind."""
    kind_routed_share: Column
    """Fraction of the layers with experts that are of a kind."""
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
    norms: Column
    """Norms of the residual stream in a block."""
    mlp_matrices: Column
    """Matrices of an MLP: 3 if it is gated, else 2."""
    vocab: Column
    predictions: Column
    """Predicted tokens for each token: 1 without multi-token prediction."""
    tied: Column
    experts: Column
    top_k: Column
    expert_ffn: Column
    shared_ffn: Column
    """Total inner width of the shared experts, which process every token."""
    parameters: Column
    """All parameters of the model."""
    trained_share: Column
    """Share of `parameters` that have gradients and optimizer state."""
    quantized_share: Column
    """Share of `parameters` that are stored in 4 bits."""
    weight_gradient_share: Column
    """FLOPs of the gradients of weights in blocks, as a share of those if all were trained, without adapters."""
    head_gradient_share: Column
    """1 if the head's matrix has a gradient, else 0."""
    adapter_rank: Column
    """Rank of the adapters of products; 0 without."""
    adapted_products: Column
    """Products of a block that have adapters. This and the following columns are means over blocks."""
    adapted_inputs: Column
    """Numbers that these products read for a token: those of all its experts."""
    adapted_outputs: Column
    """Numbers that they write for a token."""
    magnitude_weights: Column
    """Elements of their weights, if the norms of rows are trained (DoRA); else 0."""
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
    """Generation of the device and its software (`ClusterSpec.generation`)."""
    # The layout.
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
    """`Recomputation`."""
    sequence_parallel: Column
    schedule: Column
    """`Schedule`."""
    attention: Column
    """`AttentionKernel`."""
    low_precision: Column
    """Flag: linear layers run in 8 bits."""
    compute_dtype_bytes: Column
    """Bytes per number for compute and for model-parallel communication."""
    parameter_bytes: Column
    """Bytes per parameter of a rank's weights."""
    gradient_bytes: Column
    """Bytes per parameter of gradients in memory."""
    gradient_wire_bytes: Column
    """Bytes per parameter of gradients on the wire."""
    state_bytes: Column
    """Bytes per parameter of the optimizer state."""
    offload: Column
    """Storage of the training state: `layout.offload`."""
    compiled: Column
    fused_elementwise: Column
    """Flag: norms and activations run in fused kernels, rather than operation by operation."""
    trainer: Column
    """`Trainer`."""
    loss_chunk_bytes: Column
    """Maximum logits of a chunk in which head and loss are computed; infinite without chunks."""
    overlap_grad_reduce: Column
    """Flag: data-parallel communication overlaps with the backward pass."""
    overlap_tp: Column
    """Flag: tensor-parallel communication overlaps with matrix products."""
    overlap_tp_with_weight_grads: Column
    """Flag: tensor-parallel communication in backward overlaps with gradients of weights."""
    overlap_ep: Column
    """Flag: expert-parallel communication overlaps with another micro-batch's products."""
    ulysses: Column
    """Flag: context-parallel ranks exchange tokens for heads, rather than send keys and values in a ring."""
    dedup_node_dispatch: Column
    """Flag: a token crosses to a node once, however many of its experts are there."""
    tp_reductions_per_block: Column
    """Block outputs that tensor-parallel ranks sum: 2, or 1 if attention and MLP run in parallel."""
    scatter_gather_p2p: Column
    """Flag: each tensor-parallel rank sends a part of their common tensor to the next stage."""
    gathers_logits: Column
    """Flag: every tensor-parallel rank has the logits of the full vocabulary."""
    optimizer_post_validation: Column
    """Flag: the optimizer checks all gradients after the step, and reverts the step if a check fails."""
    pipeline_outermost: Column
    """Flag: the pipeline is the outermost dimension of the rank order, rather than data parallelism."""
    blocks: Column
    """Blocks of three ranks of a pipeline: [3, jobs].

    The first rank, the middle rank whose blocks cost most, and the last rank, or the one that has the head. Without a
    pipeline, the first and the last have all blocks.
    """
    moe_blocks: Column
    """Number of `blocks` with experts: [3, jobs]."""
    recomputed: Column
    """Fraction of `blocks`, the first ones, that recompute activations by the method `recompute`: [3, jobs]."""
    mean_recomputed: Column
    """Fraction of all blocks that recompute activations."""

    def by_kind(self) -> Iterator[JobTable]:
        """Yield for each kind of layers the table of models of which all layers are of that kind, with its shares."""
        if self.kind_share.ndim == 1:
            yield self
            return
        for kind in range(len(self.kind_share)):
            columns = {name: getattr(self, name)[kind] for name in PER_KIND}
            dense_fraction = columns["kind_dense_share"] / np.maximum(columns["kind_share"], 1e-12)
            yield replace(self, **columns, dense_layers=self.dense_layers * dense_fraction)

    @property
    def count(self) -> int:
        """Number of jobs."""
        return max(getattr(self, column.name).shape[-1] for column in fields(self))

    @property
    def ranks(self) -> Column:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @cached_property
    def is_phalanx(self) -> NDArray[np.bool_]:
        """Rows that Phalanx trains.

        It saves fewer activations than others. The gradient of the loss replaces the logits. Operands are cast before
        each product in 8 bits, and weight gradients are in 16 bits.
        """
        return self.trainer == CODES["Phalanx"]

    @property
    def is_deepspeed(self) -> NDArray[np.bool_]:
        """Rows that DeepSpeed's engines train."""
        return self.trainer == CODES["DeepSpeed"]

    @property
    def overlaps_param_gather(self) -> NDArray[np.bool_]:
        """Rows in which the parameter all-gather of ZeRO-1 and 2 overlaps with the next step's forward pass.

        Megatron-Core has overlap_param_gather, and FSDP gathers during compute. DeepSpeed, nanotron and Phalanx wait.
        """
        return np.isin(self.trainer, (CODES["Megatron-LM"], CODES["FSDP"]))

    @property
    def grad_reductions_per_step(self) -> Column:
        """Gradient reductions per step: one, or with Phalanx's ZeRO-2 one per micro-batch."""
        return np.where(self.is_phalanx & (self.zero_stage == 2), self.micro_batches, 1.0)

    @property
    def ring_gradient_bytes(self) -> Column:
        """Bytes per number of the gradients of keys and values, as ring attention sends them."""
        return np.where(self.is_phalanx, master_weight_bytes(self.compute_dtype_bytes), 2.0)

    @cached_property
    def casts_to_fp8(self) -> NDArray[np.bool_]:
        """Rows that cast operands before each product in 8 bits."""
        return (self.low_precision > 0) & self.is_phalanx

    @cached_property
    def uses_flash_attention(self) -> NDArray[np.bool_]:
        """Rows whose attention does not write the scores to memory."""
        return self.attention >= AttentionKernel.FLASH_1

    @cached_property
    def is_gated(self) -> NDArray[np.bool_]:
        """Rows whose MLP has a gate."""
        return self.mlp_matrices > 2

    @cached_property
    def is_fused(self) -> NDArray[np.bool_]:
        """Rows whose norms and activations run in fused or compiled kernels."""
        return (self.fused_elementwise > 0) | (self.compiled > 0)

    @cached_property
    def can_overlap(self) -> NDArray[np.bool_]:
        """Rows in which communication has its own cores, so that compute can hide it."""
        return self.comm_uses_compute_cores == 0

    @cached_property
    def tokens(self) -> Column:
        """Tokens of a micro-batch on one context-parallel rank."""
        return self.micro_batch * self.sequence / self.cp

    @cached_property
    def loss_chunks(self) -> Column:
        """Number of chunks in which head and loss are computed."""
        logits_bytes = self.compute_dtype_bytes * self.tokens * self.vocab / self.tp
        return np.maximum(1, np.ceil(logits_bytes / self.loss_chunk_bytes))

    @cached_property
    def sequence_shards(self) -> Column:
        """Tensor-parallel ranks among which sequence parallelism splits the residual stream."""
        return np.where(self.sequence_parallel > 0, self.tp, 1.0)

    @cached_property
    def expert_parameters_per_block(self) -> Column:
        """Parameters of a rank's experts in a block that has experts."""
        return self.expert_parameters / np.maximum(self.layers - self.dense_layers, 1) / self.expert_shards

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
    def is_v_shaped(self) -> NDArray[np.bool_]:
        """Rows with two stages per rank, of which the first rank has both ends of the model."""
        return np.isin(self.schedule, [CODES[name] for name in V_SCHEDULES])

    @property
    def embedding_and_head_share_rank(self) -> NDArray[np.bool_]:
        """Rows in which one rank has both embedding and head: without a pipeline, and in V schedules."""
        return (self.pp == 1) | self.is_v_shaped

    @property
    def has_middle_stages(self) -> NDArray[np.bool_]:
        """Rows in which a pipeline has ranks with neither embedding nor head."""
        return self.pp > np.where(self.embedding_and_head_share_rank, 1, 2)

    def select(self, selection: NDArray[np.int64] | NDArray[np.bool_]) -> JobTable:
        """Return the selected jobs, by index or by mask."""
        num_jobs = self.count
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        return JobTable(
            **{name: np.broadcast_to(c, (*c.shape[:-1], num_jobs))[..., selection] for name, c in columns.items()}
        )


JobRow = dict[str, Any]
"""A job's columns: numbers, names of choices, and three numbers for the columns of pipeline ranks."""


def job_table(rows: Sequence[JobRow]) -> JobTable:
    """Return a table with one job per row. Kinds of layers that a model lacks and others have get a share of 0."""
    kinds = max(len(row["kind_share"]) if isinstance(row["kind_share"], tuple) else 1 for row in rows)
    rows = rows if kinds == 1 else [row | _pad_kinds(row, kinds) for row in rows]
    return JobTable(**{f.name: as_column([row[f.name] for row in rows]) for f in fields(JobTable)})


def _pad_kinds(row: JobRow, kinds: int) -> JobRow:
    padded: JobRow = {}
    for name in PER_KIND:
        values = row[name] if isinstance(row[name], tuple) else (row[name],)
        last = 0.0 if name.endswith("_share") else values[-1]
        padded[name] = values + (last,) * (kinds - len(values))
    return padded


def broadcast_jobs(common: JobRow, varying: Mapping[str, Sequence[Any]]) -> JobTable:
    """Return a table of jobs that agree in `common` and differ in `varying`."""
    columns = {**{name: [value] for name, value in common.items()}, **varying}
    return JobTable(**{name: as_column(values) for name, values in columns.items()})


def as_column(values: Sequence[Any]) -> Column:
    """Return the column of one value per job; jobs are its last dimension."""
    numbers = [CODES[value] for value in values] if isinstance(values[0], str) else values
    return np.ascontiguousarray(np.array(numbers, dtype=np.float64).T)
