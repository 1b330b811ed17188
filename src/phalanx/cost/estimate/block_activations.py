"""Activations of a transformer block on one rank: saved for the backward pass, and recomputed in it.

All functions compute columns of many jobs at once (`cost.estimate.job_table`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.estimate.constants import MemoryConstants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.kinds import CODES, AttentionKernel, Column, select_choice

GATED_BYTES = 8.0
"""Bytes per element of a gated MLP's inner width.

Gate, up, the activated gate and their product, in 2 bytes each.
"""

LEAN_READ_BYTES = 4.0
"""Bytes per element of the residual stream's width in Phalanx: the inputs of attention and MLP, in 2 bytes each."""
LEAN_NORM_BYTES = 2.0
"""Bytes per element of this width and per norm in Phalanx: its input."""
LEAN_GATED_BYTES = 4.0
"""Bytes per element of a gated MLP's inner width in Phalanx, which saves the inputs of the activation: gate and up."""
LEAN_PLAIN_BYTES = 2.0
"""Bytes per element of the inner width of an MLP without gate in Phalanx."""


@dataclass(frozen=True)
class BlockActivations:
    """Bytes of one micro-batch in a block."""

    saved_bytes: Column
    recomputed_bytes: Column
    """Bytes while the backward pass recomputes a block; 0 without recomputation."""
    unwrapped_bytes: Column
    """Bytes saved by a block that recomputes nothing."""
    offloaded_bytes: Column
    """Bytes of a recomputed block in CPU memory."""


def activation_bytes(constants: MemoryConstants, jobs: JobTable) -> BlockActivations:
    """Return the activations of a micro-batch in a block: means over kinds of layers, and the maximum of recomputed."""
    kinds = [(kind.kind_share, _activations_of_kind(constants, kind)) for kind in jobs.by_kind()]
    saved, unwrapped, offloaded = (
        sum(share * getattr(activations, name) for share, activations in kinds)
        for name in ("saved_bytes", "unwrapped_bytes", "offloaded_bytes")
    )
    recomputed = reduce(np.maximum, (activations.recomputed_bytes for _, activations in kinds))
    return BlockActivations(saved, recomputed, unwrapped, offloaded)


def _activations_of_kind(constants: MemoryConstants, jobs: JobTable) -> BlockActivations:
    """Return the activations of a micro-batch in a block, by method of activation checkpointing."""
    # Bytes per token without recomputation, in 16 bits: inputs and outputs of norms and dropout masks, which are as
    # wide as the residual stream; queries, keys, values and the output of attention; and its scores.
    residual_bytes = np.where(jobs.is_gated, constants.wide_gated_bytes, constants.wide_bytes) + np.where(
        jobs.is_gated & ~jobs.is_fused, constants.norm_bytes, 0.0
    )
    lean_bytes = LEAN_READ_BYTES + LEAN_NORM_BYTES * jobs.norms
    residual = np.where(jobs.is_phalanx, lean_bytes, residual_bytes) * jobs.width / jobs.sequence_shards
    attention = _projection_bytes(jobs) / jobs.tp
    # Flash attention saves one number per row of scores.
    separate_factor = np.where(jobs.attention == AttentionKernel.SEPARATE, constants.score_separate, 1.0)
    unfused_bytes = constants.score_bytes * separate_factor * jobs.sequence
    scores = jobs.heads / jobs.tp * np.where(jobs.uses_flash_attention, 4.0, unfused_bytes)

    scale = jobs.tokens * jobs.compute_dtype_bytes / 2
    unscored_bytes = residual + attention + _mlp_bytes(constants, jobs)
    attention_bytes = scale * (attention + scores)
    block_bytes = scale * (unscored_bytes + scores)
    input_bytes = block_input_bytes(jobs)
    host_input_bytes = np.where(offloads_inputs(jobs), input_bytes, 0.0)
    return BlockActivations(
        saved_bytes=select_choice(
            jobs.recompute,
            {
                "full": input_bytes,
                "attention core": scale * unscored_bytes,
                "operations": block_bytes * constants.operations_kept,
                "selective": block_bytes - attention_bytes,
                "offload": input_bytes - host_input_bytes,
                "norms": block_bytes - 2 * input_bytes,
            },
            block_bytes,
        ),
        # With other methods, a sublayer has freed more when its norms or activations are recomputed.
        recomputed_bytes=select_choice(
            jobs.recompute,
            {
                "full": block_bytes,
                "attention core": scale * scores,
                "selective": attention_bytes,
                # The next input is copied back.
                "offload": block_bytes + host_input_bytes,
            },
            0.0,
        ),
        unwrapped_bytes=block_bytes,
        offloaded_bytes=host_input_bytes,
    )


def block_input_bytes(jobs: JobTable) -> Column:
    """Return the bytes of a block's input for a micro-batch."""
    return jobs.tokens * jobs.compute_dtype_bytes * jobs.width / jobs.sequence_shards


def offloads_inputs(jobs: JobTable) -> NDArray[np.bool_]:
    """Return the rows whose recomputed blocks have inputs in CPU memory, which ranks on CPUs share with tensors."""
    return (jobs.recompute == CODES["offload"]) & (jobs.comm_uses_compute_cores == 0)


def _projection_bytes(jobs: JobTable) -> Column:
    """Return the bytes per token of attention's projections on all tensor-parallel ranks together.

    Values are a view of the joint output of the query, key and value projection. If queries and keys are rotated, as in
    models with gated MLPs, the full output is saved in addition to the rotated tensors (not in Phalanx).
    """
    queries = jobs.heads * jobs.head_dim
    keys = jobs.kv_heads * jobs.head_dim
    keys_and_values = jobs.kv_heads * (jobs.head_dim + jobs.value_dim)
    outputs = jobs.heads * jobs.value_dim
    rotated = np.where(jobs.is_gated & ~jobs.is_phalanx, 2 * (queries + keys), 0.0)
    return 2 * (queries + keys_and_values + outputs) + rotated


def _mlp_bytes(constants: MemoryConstants, jobs: JobTable) -> Column:
    """Return the bytes per token of a block's MLP: the mean of dense blocks and blocks with experts."""
    fused_bytes = np.where(jobs.hardware_generation > 0, constants.gated_bytes, GATED_BYTES)
    gated_bytes = np.where(jobs.is_gated & ~jobs.is_fused, constants.gated_separate_bytes, fused_bytes)
    gated_bytes = np.where(jobs.is_phalanx, LEAN_GATED_BYTES, gated_bytes)
    plain_bytes = np.where(jobs.is_phalanx, LEAN_PLAIN_BYTES, constants.plain_bytes)
    dense_bytes = np.where(jobs.is_gated, gated_bytes, plain_bytes) * jobs.ffn / jobs.tp
    routed_bytes = jobs.top_k * (gated_bytes * jobs.expert_ffn + 4 * jobs.width)
    expert_bytes = (routed_bytes + gated_bytes * jobs.shared_ffn) / jobs.tp
    dense_fraction = jobs.dense_layers / jobs.layers
    return dense_fraction * dense_bytes + (1 - dense_fraction) * np.where(jobs.experts > 0, expert_bytes, 0.0)
