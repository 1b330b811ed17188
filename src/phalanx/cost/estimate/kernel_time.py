"""Time of operations on one device.

Matrix products depend on their shape, attention on its kernel, and other operations on the memory that they read and
write. All functions compute columns of many jobs at once (`cost.estimate.job_table`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.estimate.constants import TimeConstants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.kinds import AttentionKernel, Column

LinearSeconds = tuple[Column, Column, Column]
"""Seconds of a linear layer: forward, input gradient, weight gradient."""
TILES = ((256, 128, 0), (128, 256, 0), (128, 128, 1), (128, 64, 2), (64, 64, 3))
"""Rows and columns of the tiles of matrix-product libraries, and size steps below the largest."""
CAST_BYTES = 9
"""Bytes that a cast of a bf16 number to float8 reads and writes: its maximum, its product with the scale, the cast."""
COMPILED_CAST_BYTES = 5
"""Bytes of a cast whose product with the scale is fused."""
MERGE_BYTES = 26
"""Bytes that a step of a ring reads and writes per number of its output, to merge it."""
ADD_BYTES = 14
"""Bytes that a step of a ring reads and writes per number of its gradients, to copy operands and to add them."""
STEP_KERNELS = 10
"""Kernels of a step of a ring, in each direction."""


def memory_pass_seconds(constants: TimeConstants, jobs: JobTable, size_bytes: Column) -> Column:
    """Return the seconds to read or write bytes of device memory."""
    return size_bytes / (jobs.hbm_bytes_per_second * constants.of_generation("hbm", jobs.hardware_generation))


def matmul_seconds(
    constants: TimeConstants,
    jobs: JobTable,
    m: Column,
    n: Column,
    k: Column,
    batch: Column | float = 1.0,
    linear: bool | NDArray[np.bool_] = True,
) -> Column:
    """Return the seconds of `batch` products of [m, k] with [k, n].

    Roofline: the maximum of the time of waves of tiles over the multiprocessors, and the time of the memory accesses
    (tiles: NVIDIA, Matrix Multiplication Background, section 4). The library picks the fastest tile. A partial last
    wave loses the fraction `wave_tail` of its idle part. `linear` products are in the precision of training, others,
    such as attention's own, always in 16 bits.
    """
    is_8bit = jobs.low_precision * linear
    flops_16bit = jobs.matmul_flops * constants.of_generation("gemm", jobs.hardware_generation)
    flops_per_second = np.where(is_8bit > 0, jobs.low_matmul_flops * constants.low_precision, flops_16bit)
    is_tiled = jobs.num_sms > 0
    num_units = np.where(is_tiled, jobs.num_sms, 1.0)
    min_seconds: Column = np.asarray(np.inf)
    for rows, columns, size_step in TILES:
        waves = np.ceil(m / rows) * np.ceil(n / columns) * batch / num_units
        started_waves = np.maximum(waves, constants.wave_tail)
        waves = np.where(
            is_tiled,
            started_waves + constants.wave_tail * (np.ceil(waves) - started_waves),
            m * n * batch / (rows * columns * num_units),
        )
        tile_flops_per_second = flops_per_second * constants.small_tile**size_step
        wave_seconds = 2 * rows * columns * (k + constants.depth) * num_units / tile_flops_per_second
        min_seconds = np.minimum(min_seconds, waves * wave_seconds)
    memory_seconds = memory_pass_seconds(constants, jobs, jobs.compute_dtype_bytes * (m * k + k * n + m * n) * batch)
    return np.maximum(min_seconds, memory_seconds) + constants.gap_seconds


def linear_seconds(
    constants: TimeConstants,
    jobs: JobTable,
    m: Column,
    n: Column,
    k: Column,
    batch: Column | float = 1.0,
    readers: Column | float = 1.0,
) -> LinearSeconds:
    """Return the seconds of `batch` linear layers [n, k] on m tokens: forward, input gradient, weight gradient.

    `readers` layers together have the n outputs; each casts the tokens to float8, unless compiled. From the second
    micro-batch on, the weight gradient is accumulated, which reads and writes it once more.
    """

    def cast_seconds(count: Column) -> Column:
        cast_bytes = np.where(jobs.compiled > 0, COMPILED_CAST_BYTES, CAST_BYTES) * jobs.casts_to_fp8
        return memory_pass_seconds(constants, jobs, cast_bytes * count)

    casts = np.where(jobs.compiled > 0, 1.0, readers)
    later_fraction = 1 - 1 / jobs.micro_batches
    accumulate_seconds = later_fraction * memory_pass_seconds(constants, jobs, 2 * jobs.gradient_bytes * n * k * batch)
    return (
        matmul_seconds(constants, jobs, m, n, k, batch) + cast_seconds(batch * (casts * m + n) * k),
        matmul_seconds(constants, jobs, m, k, n, batch) + cast_seconds(batch * (m + k) * n),
        matmul_seconds(constants, jobs, k, n, m, batch, linear=~jobs.casts_to_fp8) + accumulate_seconds,
    )


def attention_seconds(constants: TimeConstants, jobs: JobTable) -> tuple[Column, Column]:
    """Return the seconds of attention's core on a rank's heads and queries, forward and backward.

    The core excludes the projections. Flash kernels compute half of the T x T pairs (causal), and 2.5 times the FLOPs
    in the backward pass (arXiv 2307.08691, section 3.1). Other kernels compute all pairs and write the scores to
    memory. A ring computes the same pairs as flash attention, and merges its steps.
    """
    heads = jobs.heads / jobs.tp
    score_pairs = jobs.micro_batch * heads * jobs.sequence * jobs.sequence / jobs.cp
    flash_forward = _flash_attention_seconds(constants, jobs, score_pairs)
    flash_backward = 2.5 * constants.flash_backward * flash_forward
    merge_forward, merge_backward = _ring_merge_seconds(constants, jobs)

    def product_seconds(n: Column, k: Column) -> Column:
        queries = jobs.sequence / jobs.cp
        return matmul_seconds(constants, jobs, queries, n, k, batch=jobs.micro_batch * heads, linear=False)

    products = product_seconds(jobs.sequence, jobs.head_dim) + product_seconds(jobs.value_dim, jobs.sequence)
    products = np.where(jobs.head_dim % 8 == 0, products, products / constants.misaligned)
    separate_factor = np.where(jobs.attention == AttentionKernel.SEPARATE, constants.score_separate, 1.0)
    score_bytes = jobs.compute_dtype_bytes * score_pairs * constants.score_passes * separate_factor
    scores = memory_pass_seconds(constants, jobs, score_bytes)
    return (
        np.where(jobs.uses_flash_attention, flash_forward + merge_forward, products + scores),
        np.where(
            jobs.uses_flash_attention,
            flash_backward + merge_backward,
            2 * products + scores * constants.score_backward,
        ),
    )


def _flash_attention_seconds(constants: TimeConstants, jobs: JobTable, score_pairs: Column) -> Column:
    """Return the seconds of a forward pass of flash attention."""
    flops = 2 * score_pairs * (jobs.head_dim + jobs.value_dim)
    peak_fraction = np.select(
        [
            jobs.attention == AttentionKernel.FLASH_1,
            (jobs.attention == AttentionKernel.RING) & (jobs.hardware_generation > 0),
            jobs.hardware_generation == 0,
            jobs.hardware_generation >= 2,
            jobs.attention == AttentionKernel.FLASH_3,
        ],
        [constants.flash_1, constants.flash_2_later, constants.flash_2, constants.flash_4, constants.flash_3],
        constants.flash_2_later,
    )
    diagonal_factor = 1 + constants.flash_start / jobs.sequence
    narrow_head_factor = np.where(jobs.head_dim <= 64, 1.3, 1.0)
    causal_flops = flops / 2 * jobs.attended_fraction
    flash_seconds = causal_flops * diagonal_factor / (peak_fraction * jobs.peak_flops) * narrow_head_factor
    return flash_seconds + constants.gap_seconds


def _ring_merge_seconds(constants: TimeConstants, jobs: JobTable) -> tuple[Column, Column]:
    """Return the seconds of the small kernels in a ring's steps after the first, forward and backward.

    Such a step has all keys for half of the queries, or half of the keys for all queries (zig-zag), in turn. Gradients
    and the merged output are fp32 (`parallel.block_attention.RingBlock`).
    """
    steps = np.where(jobs.attention == AttentionKernel.RING, jobs.cp - 1, 0.0)
    tokens = 0.75 * steps * jobs.micro_batch * jobs.sequence / jobs.cp
    outputs = tokens * jobs.heads * jobs.value_dim / jobs.tp
    gradients = tokens * (jobs.heads * jobs.head_dim + jobs.kv_heads * (jobs.head_dim + jobs.value_dim)) / jobs.tp
    gap_seconds = steps * STEP_KERNELS * constants.gap_seconds
    return (
        gap_seconds + memory_pass_seconds(constants, jobs, MERGE_BYTES * outputs),
        gap_seconds + memory_pass_seconds(constants, jobs, ADD_BYTES * gradients),
    )
