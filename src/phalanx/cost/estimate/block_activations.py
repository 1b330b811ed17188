"""Activations of a transformer block on one rank: saved for the backward pass, and recomputed in it.

All functions compute columns of many jobs at once (`cost.estimate.job_table`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.estimate.constants import MemoryConstants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.kinds import ActivationCheckpointing, AttentionKernel, Column

GATED_BYTES = 8.0
"""Bytes per element of a gated MLP's inner width.

Gate, up, the activated gate and their product, in 2 bytes each.
"""

LEAN_WIDE_BYTES = 8.0
"""Bytes per element of the residual stream's width in Phalanx: inputs of two norms, and their outputs."""
LEAN_GATED_BYTES = 4.0
"""Bytes per element of a gated MLP's inner width in Phalanx, which saves the inputs of the activation: gate and up."""
LEAN_PLAIN_BYTES = 2.0
"""The same of an MLP without gate."""


@dataclass(frozen=True)
class BlockActivations:
    """Bytes of one micro-batch in a block."""

    saved: Column
    recomputed: Column
    """Bytes while the backward pass recomputes a block; 0 without recomputation."""
    unwrapped: Column
    """Bytes saved by a block that recomputes nothing."""
    offloaded: Column
    """Bytes of a recomputed block in CPU memory."""


@dataclass(frozen=True, kw_only=True)
class _TensorBytes:
    """Bytes per token of the tensors that a block saves without recomputation, in 16 bits."""

    residual: Column
    """Inputs and outputs of norms, and dropout masks, all as wide as the residual stream."""
    attention: Column
    """Queries, keys, values and the output of attention."""
    mlp: Column
    """Inner tensors of the MLP, or of the experts."""
    scores: Column
    """Scores of attention and their softmax; statistics of rows in flash attention."""


def activation_bytes(constants: MemoryConstants, jobs: JobTable) -> BlockActivations:
    """Return the activations of a micro-batch in a block, by method of activation checkpointing."""
    tensors = _saved_tensors(constants, jobs)
    scale = jobs.tokens * jobs.compute_dtype_bytes / 2  # the constants are for 16 bits
    unscored_bytes = tensors.residual + tensors.attention + tensors.mlp
    score_bytes = scale * tensors.scores
    attention_bytes = scale * (tensors.attention + tensors.scores)
    block_bytes = scale * (unscored_bytes + tensors.scores)
    input_bytes = block_input_bytes(jobs)
    host_input_bytes = np.where(offloads_inputs(jobs), input_bytes, 0.0)
    saved = {
        ActivationCheckpointing.FULL: input_bytes,
        ActivationCheckpointing.SELECTIVE: scale * unscored_bytes,
        ActivationCheckpointing.OPERATIONS: block_bytes * constants.operations_kept,
        ActivationCheckpointing.ATTENTION: block_bytes - attention_bytes,
        ActivationCheckpointing.OFFLOAD: input_bytes - host_input_bytes,
        ActivationCheckpointing.NORMS: block_bytes - 2 * input_bytes,
    }
    recomputed = {
        ActivationCheckpointing.FULL: block_bytes,
        ActivationCheckpointing.SELECTIVE: score_bytes,
        ActivationCheckpointing.OPERATIONS: 0.0 * block_bytes,
        ActivationCheckpointing.ATTENTION: attention_bytes,
        ActivationCheckpointing.OFFLOAD: block_bytes + host_input_bytes,  # the next one is copied back
        ActivationCheckpointing.NORMS: 0.0 * block_bytes,  # a sublayer has freed more when its norm is recomputed
    }
    conditions = [jobs.recompute == method for method in saved]
    return BlockActivations(
        saved=np.select(conditions, list(saved.values()), block_bytes),
        recomputed=np.select(conditions, list(recomputed.values()), 0.0),
        unwrapped=block_bytes,
        offloaded=host_input_bytes,
    )


def block_input_bytes(jobs: JobTable) -> Column:
    """Return the bytes of a block's input for a micro-batch."""
    return jobs.tokens * jobs.compute_dtype_bytes * jobs.width / _sequence_shards(jobs)


def offloads_inputs(jobs: JobTable) -> NDArray[np.bool_]:
    """Return the rows whose recomputed blocks have inputs in CPU memory, which ranks on CPUs share with tensors."""
    offloads: NDArray[np.bool_] = jobs.recompute == ActivationCheckpointing.OFFLOAD
    is_separate: NDArray[np.bool_] = jobs.comm_uses_compute_cores == 0
    return offloads & is_separate


def _saved_tensors(constants: MemoryConstants, jobs: JobTable) -> _TensorBytes:
    residual_bytes = np.where(_is_gated(jobs), constants.wide_gated_bytes, constants.wide_bytes) + np.where(
        _is_gated_unfused(jobs), constants.norm_bytes, 0.0
    )
    residual_bytes = np.where(jobs.lean_activations > 0, LEAN_WIDE_BYTES, residual_bytes)
    return _TensorBytes(
        residual=residual_bytes * jobs.width / _sequence_shards(jobs),
        attention=_projection_bytes(jobs) / jobs.tp,
        mlp=_mlp_bytes(constants, jobs),
        scores=_score_bytes(constants, jobs),
    )


def _sequence_shards(jobs: JobTable) -> Column:
    """Return the number of tensor-parallel ranks among which sequence parallelism splits the residual stream."""
    shards: Column = np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    return shards


def _is_gated(jobs: JobTable) -> NDArray[np.bool_]:
    return jobs.mlp_matrices > 2


def _is_gated_unfused(jobs: JobTable) -> NDArray[np.bool_]:
    is_fused = (jobs.fused_elementwise > 0) | (jobs.compiled > 0)
    return _is_gated(jobs) & ~is_fused


def _projection_bytes(jobs: JobTable) -> Column:
    """Return the bytes per token of attention's projections on all tensor-parallel ranks together.

    Values are a view of the joint output of the query, key and value projection. If queries and keys are rotated, as in
    models with gated MLPs, the full output is saved in addition to the rotated tensors (not in Phalanx).
    """
    queries = jobs.heads * jobs.head_dim
    keys = jobs.kv_heads * jobs.head_dim
    keys_and_values = jobs.kv_heads * (jobs.head_dim + jobs.value_dim)
    outputs = jobs.heads * jobs.value_dim
    saves_rotated = _is_gated(jobs) & (jobs.lean_activations == 0)
    return 2 * (queries + keys_and_values + outputs) + np.where(saves_rotated, 2 * (queries + keys), 0.0)


def _mlp_bytes(constants: MemoryConstants, jobs: JobTable) -> Column:
    """Return the bytes per token of a block's MLP: the mean of dense blocks and blocks with experts."""
    gated_bytes = np.where(
        _is_gated_unfused(jobs),
        constants.gated_separate_bytes,
        np.where(jobs.hardware_generation > 0, constants.gated_bytes, GATED_BYTES),
    )
    is_lean = jobs.lean_activations > 0
    gated_bytes = np.where(is_lean, LEAN_GATED_BYTES, gated_bytes)
    plain_bytes = np.where(is_lean, LEAN_PLAIN_BYTES, constants.plain_bytes)
    dense_bytes = np.where(_is_gated(jobs), gated_bytes, plain_bytes) * jobs.ffn / jobs.tp
    routed_bytes = jobs.top_k * (gated_bytes * jobs.expert_ffn + 4 * jobs.width)
    expert_bytes = (routed_bytes + gated_bytes * jobs.shared_ffn) / jobs.tp
    dense_fraction = jobs.dense_layers / jobs.layers
    return dense_fraction * dense_bytes + (1 - dense_fraction) * np.where(jobs.experts > 0, expert_bytes, 0.0)


def _score_bytes(constants: MemoryConstants, jobs: JobTable) -> Column:
    """Return the bytes per token of attention's scores, of which flash attention saves one number per row."""
    is_flash = jobs.attention >= AttentionKernel.FLASH_1
    separate_factor = np.where(jobs.attention == AttentionKernel.SEPARATE, constants.score_separate, 1.0)
    bytes_per_query = np.where(is_flash, 4.0, constants.score_bytes * separate_factor * jobs.sequence)
    return jobs.heads / jobs.tp * bytes_per_query
