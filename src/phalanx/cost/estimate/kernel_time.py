"""How long operations take on one device: matrix products by their shape, attention by its kernel, the rest by the
memory that they pass over. Columns of many jobs at once (`cost.jobs`)."""

from __future__ import annotations

import numpy as np

from phalanx.cost.estimate.constants import TimeConstants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.kinds import AttentionKernel, Column

TILES = ((256, 128, 0), (128, 256, 0), (128, 128, 1), (128, 64, 2), (64, 64, 3))
"""Rows and columns of the tiles that libraries cut a product into, and how often each is smaller than the largest."""


def by_generation(jobs: JobTable, first: float, second: float, third: float) -> Column:
    """The constant of each job's era."""
    return np.choose(jobs.hardware_generation.astype(np.int64), [first, second, third])


def memory_pass_seconds(c: TimeConstants, jobs: JobTable, size_bytes: Column) -> Column:
    """Seconds to read or write so many bytes of device memory."""
    return size_bytes / (jobs.hbm_bytes_per_second * by_generation(jobs, c.hbm_0, c.hbm_1, c.hbm_2))


def matmul_seconds(
    c: TimeConstants, jobs: JobTable, m: Column, n: Column, k: Column, batch: Column | float = 1.0, linear: bool = True
) -> Column:
    """Seconds of `batch` products of [m, k] with [k, n]: waves of tiles over the multiprocessors, or the memory that
    they pass over, whichever takes longer (a roofline; tiles: NVIDIA, Matrix Multiplication Background, section 4).

    `linear` products run at the precision of training, attention's own always in 16 bits. The library takes the tile
    that is fastest; a last wave that is not full costs `c.tail` of a full one.
    """
    eight_bits = jobs.low_precision * linear
    sixteen = jobs.matmul_flops * by_generation(jobs, c.gemm_0, c.gemm_1, c.gemm_2)
    speed = np.where(eight_bits > 0, jobs.low_matmul_flops * c.low_precision, sixteen)
    tiled = jobs.num_sms > 0
    units = np.where(tiled, jobs.num_sms, 1.0)
    best: Column = np.asarray(np.inf)
    for rows, columns, smaller in TILES:
        waves = np.ceil(m / rows) * np.ceil(n / columns) * batch / units
        started = np.maximum(waves, c.wave_tail)
        waves = np.where(
            tiled, started + c.wave_tail * (np.ceil(waves) - started), m * n * batch / (rows * columns * units)
        )
        one_wave = 2 * rows * columns * (k + c.depth) * units / (speed * c.small_tile**smaller)
        best = np.minimum(best, waves * one_wave)
    moved = memory_pass_seconds(c, jobs, jobs.compute_dtype_bytes * (m * k + k * n + m * n) * batch)
    return np.maximum(best, moved) + c.gap_seconds


def linear_seconds(
    c: TimeConstants, jobs: JobTable, m: Column, n: Column, k: Column, batch: Column | float = 1.0
) -> tuple[Column, Column, Column]:
    """Seconds of a linear layer of [n, k] on m tokens: forward, gradient of its input, gradient of its weight.

    From the second micro-batch on, the gradient of the weight is added to what there is: read and written once more.
    """
    later = 1 - 1 / jobs.micro_batches
    added = later * memory_pass_seconds(c, jobs, 2 * jobs.gradient_bytes * n * k * batch)
    return (
        matmul_seconds(c, jobs, m, n, k, batch),
        matmul_seconds(c, jobs, m, k, n, batch),
        matmul_seconds(c, jobs, k, n, m, batch) + added,
    )


def attention_seconds(c: TimeConstants, jobs: JobTable) -> tuple[Column, Column]:
    """Seconds of attention's core on a rank's heads and queries, forward and backward: without its projections.

    Flash kernels do half of the T x T pairs (causal) and 2.5 times the FLOPs in the backward pass (arXiv 2307.08691,
    section 3.1); the others do all of them and pass over the scores.
    """
    T, heads = jobs.sequence, jobs.heads / jobs.tp
    pairs = jobs.micro_batch * heads * T * T / jobs.cp
    flops = 2 * pairs * (jobs.head_dim + jobs.value_dim)
    share = np.select(
        [
            jobs.attention == AttentionKernel.FLASH_1,
            jobs.hardware_generation == 0,
            jobs.hardware_generation == 2,
            jobs.attention == AttentionKernel.FLASH_3,
        ],
        [c.flash_1, c.flash_2, c.flash_4, c.flash_3],
        c.flash_2_later,
    )
    narrow = np.where(jobs.head_dim <= 64, 1.3, 1.0)
    flash = flops / 2 * (1 + c.flash_start / T) / (share * jobs.peak_flops) * narrow + c.gap_seconds

    rows, aligned = T / jobs.cp, jobs.head_dim % 8 == 0
    products = matmul_seconds(c, jobs, rows, T, jobs.head_dim, jobs.micro_batch * heads, linear=False)
    products = products + matmul_seconds(c, jobs, rows, jobs.value_dim, T, jobs.micro_batch * heads, linear=False)
    products = np.where(aligned, products, products / c.misaligned)
    separate = np.where(
        (jobs.attention == AttentionKernel.SEPARATE) | (jobs.attention == AttentionKernel.RING_PLAIN),
        c.score_separate,
        1.0,
    )
    scores = memory_pass_seconds(c, jobs, jobs.compute_dtype_bytes * pairs * c.score_passes * separate)

    written = products + scores
    written_back = 2 * products + scores * c.score_backward
    is_flash, is_ring = jobs.attention >= AttentionKernel.FLASH_1, jobs.attention == AttentionKernel.RING_PLAIN
    forward = np.where(is_ring, written / 2, np.where(is_flash, flash, written))
    flash_back = np.where(is_ring, (written + written_back) / 2, 2.5 * c.flash_backward * flash)
    return forward, np.where(is_flash, flash_back, written_back)
