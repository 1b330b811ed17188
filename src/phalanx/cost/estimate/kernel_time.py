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


def by_generation(jobs: JobTable, first: float, second: float, third: float) -> Column:
    """Return the constant of each job's hardware generation.

    Args:
        jobs: Columns of jobs.
        first: Constant of generation 0 (`JobTable.hardware_generation`).
        second: Constant of generation 1.
        third: Constant of generation 2.
    """
    return np.choose(jobs.hardware_generation.astype(np.int64), [first, second, third])


def memory_pass_seconds(constants: TimeConstants, jobs: JobTable, size_bytes: Column) -> Column:
    """Return the seconds to read or write device memory.

    Args:
        constants: Fitted constants of time.
        jobs: Columns of jobs.
        size_bytes: Bytes read and written together.
    """
    return size_bytes / (
        jobs.hbm_bytes_per_second * by_generation(jobs, constants.hbm_0, constants.hbm_1, third=constants.hbm_2)
    )


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
    wave loses the fraction `wave_tail` of its idle part.

    Args:
        constants: Fitted constants of time.
        jobs: Columns of jobs.
        m: Rows of the product.
        n: Columns of the product.
        k: Inner dimension.
        batch: Number of products.
        linear: True for products in the precision of training, False for attention's own, which are always in 16 bits.
    """
    is_8bit = jobs.low_precision * linear
    flops_16bit = jobs.matmul_flops * by_generation(jobs, constants.gemm_0, constants.gemm_1, third=constants.gemm_2)
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
        wave_seconds = (
            2
            * rows
            * columns
            * (k + constants.depth)
            * num_units
            / (flops_per_second * constants.small_tile**size_step)
        )
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
) -> tuple[Column, Column, Column]:
    """Return the seconds of a linear layer [n, k] on m tokens: forward, input gradient, weight gradient.

    From the second micro-batch on, the weight gradient is accumulated, which reads and writes it once more.

    Args:
        constants: Fitted constants of time.
        jobs: Columns of jobs.
        m: Tokens.
        n: Output width.
        k: Input width.
        batch: Number of layers.
        readers: Layers that n belongs to together; each casts the tokens to float8, unless compiled.
    """
    casts = np.where(jobs.compiled > 0, 1.0, readers)
    later_fraction = 1 - 1 / jobs.micro_batches
    accumulate_seconds = later_fraction * memory_pass_seconds(constants, jobs, 2 * jobs.gradient_bytes * n * k * batch)
    return (
        matmul_seconds(constants, jobs, m, n=n, k=k, batch=batch)
        + _cast_seconds(constants, jobs, batch * (casts * m + n) * k),
        matmul_seconds(constants, jobs, m, n=k, k=n, batch=batch) + _cast_seconds(constants, jobs, batch * (m + k) * n),
        matmul_seconds(constants, jobs, k, n=n, k=m, batch=batch, linear=jobs.casts_to_fp8 == 0) + accumulate_seconds,
    )


def _cast_seconds(constants: TimeConstants, jobs: JobTable, count: Column) -> Column:
    """Return the seconds in which a job casts `count` numbers to float8, if it does."""
    cast_bytes = np.where(jobs.compiled > 0, COMPILED_CAST_BYTES, CAST_BYTES) * (jobs.casts_to_fp8 > 0)
    return memory_pass_seconds(constants, jobs, cast_bytes * count)


def attention_seconds(constants: TimeConstants, jobs: JobTable) -> tuple[Column, Column]:
    """Return the seconds of attention's core on a rank's heads and queries, forward and backward.

    The core excludes the projections. Flash kernels compute half of the T x T pairs (causal), and 2.5 times the FLOPs
    in the backward pass (arXiv 2307.08691, section 3.1). Other kernels compute all pairs and write the scores to
    memory. A ring computes the same pairs as flash attention, and merges its steps.
    """
    is_flash = jobs.attention >= AttentionKernel.FLASH_1
    flash_forward = _flash_attention_seconds(constants, jobs)
    flash_backward = 2.5 * constants.flash_backward * flash_forward
    merge_forward, merge_backward = _ring_merge_seconds(constants, jobs)
    unfused_forward, unfused_backward = _unfused_attention_seconds(constants, jobs)
    return (
        np.where(is_flash, flash_forward + merge_forward, unfused_forward),
        np.where(is_flash, flash_backward + merge_backward, unfused_backward),
    )


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


def _score_pairs(jobs: JobTable) -> Column:
    """Return the number of pairs of a query and a key on a rank's heads, without a causal mask."""
    return jobs.micro_batch * (jobs.heads / jobs.tp) * jobs.sequence * jobs.sequence / jobs.cp


def _flash_attention_seconds(constants: TimeConstants, jobs: JobTable) -> Column:
    """Return the seconds of a forward pass of flash attention."""
    flops = 2 * _score_pairs(jobs) * (jobs.head_dim + jobs.value_dim)
    peak_fraction = np.select(
        [
            jobs.attention == AttentionKernel.FLASH_1,
            (jobs.attention == AttentionKernel.RING) & (jobs.hardware_generation > 0),
            jobs.hardware_generation == 0,
            jobs.hardware_generation == 2,
            jobs.attention == AttentionKernel.FLASH_3,
        ],
        [constants.flash_1, constants.flash_2_later, constants.flash_2, constants.flash_4, constants.flash_3],
        constants.flash_2_later,
    )
    diagonal_factor = 1 + constants.flash_start / jobs.sequence
    narrow_head_factor = np.where(jobs.head_dim <= 64, 1.3, 1.0)
    causal_flops = flops / 2 * jobs.attended_fraction
    return (
        causal_flops * diagonal_factor / (peak_fraction * jobs.peak_flops) * narrow_head_factor + constants.gap_seconds
    )


def _unfused_attention_seconds(constants: TimeConstants, jobs: JobTable) -> tuple[Column, Column]:
    """Return the seconds of attention that writes its scores to memory, forward and backward."""
    queries = jobs.sequence / jobs.cp
    num_products = jobs.micro_batch * (jobs.heads / jobs.tp)
    product_seconds = matmul_seconds(
        constants, jobs, queries, n=jobs.sequence, k=jobs.head_dim, batch=num_products, linear=False
    )
    product_seconds = product_seconds + matmul_seconds(
        constants, jobs, queries, n=jobs.value_dim, k=jobs.sequence, batch=num_products, linear=False
    )
    is_aligned = jobs.head_dim % 8 == 0
    product_seconds = np.where(is_aligned, product_seconds, product_seconds / constants.misaligned)
    separate_factor = np.where(jobs.attention == AttentionKernel.SEPARATE, constants.score_separate, 1.0)
    score_seconds = memory_pass_seconds(
        constants, jobs, jobs.compute_dtype_bytes * _score_pairs(jobs) * constants.score_passes * separate_factor
    )
    return product_seconds + score_seconds, 2 * product_seconds + score_seconds * constants.score_backward
