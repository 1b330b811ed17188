"""How long one block of a transformer takes on one rank: its products, attention, passes over memory, and exchanges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.cost.estimate.collective_time import all_to_all_seconds, ring_seconds
from phalanx.cost.estimate.constants import TimeConstants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.estimate.kernel_time import attention_seconds, by_generation, linear_seconds, memory_pass_seconds
from phalanx.cost.exact.flops import SELECTIVE_MATMUL_FRACTION
from phalanx.cost.kinds import RECOMPUTED, ActivationCheckpointing, AttentionKernel, Column


@dataclass(frozen=True)
class BlockTime:
    """Seconds of one micro-batch in one block."""

    forward: Column
    backward: Column
    """With what is computed again."""
    weight: Column
    """Of the backward pass, the gradients of weights: what split backward passes put off."""
    exchange: Column
    """Of both passes, tensor, context and expert parallelism's exchanges, as far as they are seen."""


def block_seconds(c: TimeConstants, jobs: JobTable) -> tuple[BlockTime, BlockTime]:
    """A block with a dense MLP, and one with experts (evenly loaded; zero in a model that has none)."""
    tokens = jobs.tokens
    attention = _attention(c, jobs, tokens)
    dense = _block_time(c, jobs, tokens, attention, _mlp(c, jobs, tokens), np.zeros(1), extra=0)
    routed = jobs.experts > 0
    sent = jobs.compute_dtype_bytes * tokens * jobs.width * jobs.top_k / jobs.tp
    shown = np.where(jobs.overlap_ep > 0, c.overlap_leak, 1.0)
    exchange = np.where(routed, 2 * all_to_all_seconds(c, jobs, sent) * shown, 0.0)
    return dense, _block_time(c, jobs, tokens, attention, _experts(c, jobs, tokens), exchange, extra=20)


@dataclass(frozen=True)
class _LayerTimes:
    """Products of a part of a block: forward, gradients of inputs, of weights; passes over memory; attention's core."""

    forward: Column
    inputs: Column
    weights: Column
    passes: Column
    core: tuple[Column, Column] = (np.zeros(1), np.zeros(1))


def _attention(c: TimeConstants, jobs: JobTable, tokens: Column) -> _LayerTimes:
    D, inner = jobs.width, jobs.heads * jobs.value_dim / jobs.tp
    into = linear_seconds(c, jobs, tokens, np.maximum(jobs.attention_parameters / D / jobs.tp - inner, 64), D)
    out = linear_seconds(c, jobs, tokens, D, inner)
    forward, inputs, weights = (a + b for a, b in zip(into, out, strict=True))
    separate_norms = (jobs.mlp_matrices > 2) & (jobs.fused_elementwise == 0) & (jobs.compiled == 0)
    parted = np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    compiled = _compiled(c, jobs)
    wide = (c.width_passes * compiled + np.where(separate_norms, c.norm_passes, 0.0)) / parted
    passes = memory_pass_seconds(
        c, jobs, jobs.compute_dtype_bytes * tokens * D * (wide + c.shared_passes * compiled / jobs.tp)
    )
    return _LayerTimes(forward, inputs, weights, passes, attention_seconds(c, jobs))


def _compiled(c: TimeConstants, jobs: JobTable) -> Column:
    """Of the passes over memory, the part that torch.compile leaves."""
    left: Column = np.where(jobs.compiled > 0, c.compiled, 1.0)
    return left


def _mlp(c: TimeConstants, jobs: JobTable, tokens: Column) -> _LayerTimes:
    up = linear_seconds(c, jobs, tokens, jobs.ffn * (jobs.mlp_matrices - 1) / jobs.tp, jobs.width)
    down = linear_seconds(c, jobs, tokens, jobs.width, jobs.ffn / jobs.tp)
    compiled = _compiled(c, jobs)
    inner = jobs.ffn * (jobs.mlp_matrices - 1) / jobs.tp * c.inner_passes * compiled
    forward, inputs, weights = (a + b for a, b in zip(up, down, strict=True))
    return _LayerTimes(
        forward, inputs, weights, memory_pass_seconds(c, jobs, jobs.compute_dtype_bytes * tokens * inner)
    )


def _experts(c: TimeConstants, jobs: JobTable, tokens: Column) -> _LayerTimes:
    """Whole experts; tensor-parallel ranks share the tokens that go to them."""
    count, D = np.maximum(jobs.experts, 1), jobs.width
    here, ffn, shared = count / jobs.ep, np.maximum(jobs.expert_ffn, 1), np.maximum(jobs.shared_ffn, 1) / jobs.tp
    copies = tokens * jobs.top_k / jobs.tp
    each = copies * jobs.ep / count
    up, down = linear_seconds(c, jobs, each, 2 * ffn, D, here), linear_seconds(c, jobs, each, D, ffn, here)
    also_up, also_down = linear_seconds(c, jobs, tokens, 2 * shared, D), linear_seconds(c, jobs, tokens, D, shared)
    routed, has_shared = jobs.experts > 0, jobs.shared_ffn > 0
    forward, inputs, weights = (
        np.where(routed, a + b, 0.0) + np.where(has_shared, p + q, 0.0)
        for a, b, p, q in zip(up, down, also_up, also_down, strict=True)
    )
    compiled = _compiled(c, jobs)
    inner = 2 * (copies * jobs.expert_ffn + tokens * jobs.shared_ffn / jobs.tp) * c.inner_passes * compiled
    passes = memory_pass_seconds(c, jobs, jobs.compute_dtype_bytes * (inner + copies * D * c.route_passes))
    return _LayerTimes(forward, inputs, weights, passes)


def _block_time(
    c: TimeConstants,
    jobs: JobTable,
    tokens: Column,
    attention: _LayerTimes,
    rest: _LayerTimes,
    sent: Column,
    extra: int,
) -> BlockTime:
    core, core_back = attention.core
    operations = c.operations * np.where(jobs.compiled > 0, 0.6, np.where(jobs.fused_elementwise > 0, 0.75, 1.0))
    operations = operations + 4 * (jobs.tp > 1)
    gaps = operations * c.gap_seconds / 2
    passes, weights = attention.passes + rest.passes, attention.weights + rest.weights
    forward = attention.forward + rest.forward + core + passes + gaps
    backward = attention.inputs + rest.inputs + weights + core_back + passes * c.backward_passes + 2 * gaps

    ring, ring_back = _context_parallel(c, jobs, tokens, core)
    between = _tensor_parallel(c, jobs, tokens)
    hidden = np.where(
        (jobs.overlap_tp_with_weight_grads > 0) & (jobs.comm_uses_compute_cores == 0),
        (1 - c.overlap_leak) * np.minimum(between, weights),
        0.0,
    )
    ahead, back = between + sent + ring, between - hidden + sent + ring_back

    flash = jobs.attention >= AttentionKernel.FLASH_1
    products = SELECTIVE_MATMUL_FRACTION * (attention.forward + rest.forward)
    partly = np.where(jobs.zero_stage >= 3, products, 0.0) + passes
    again = np.select(
        [jobs.recompute == kind for kind in RECOMPUTED],
        [forward + ahead, np.where(flash, 0.0, core), partly, attention.forward + core],
        0.0,
    )
    host = (operations + extra) * c.launch_seconds * by_generation(jobs, 1.0, c.launch_1, c.launch_2)
    both = 1.5 + (jobs.recompute == ActivationCheckpointing.FULL)
    return BlockTime(
        smooth_max(forward + ahead, host), smooth_max(backward + back + again, host * both), weights, ahead + back
    )


def smooth_max(device: Column, other: Column, sharpness: int = 4) -> Column:
    """The longer of two times, and a little more where they are alike: neither hides quite in the other."""
    return (device**sharpness + other**sharpness) ** (1 / sharpness)


def _tensor_parallel(c: TimeConstants, jobs: JobTable, tokens: Column) -> Column:
    """Of one pass: an all-reduce after attention and one after the MLP, or with sequence parallelism an all-gather and
    a reduce-scatter each (arXiv 2205.05198, section 4.2.2)."""
    size = jobs.compute_dtype_bytes * tokens * jobs.width
    one = ring_seconds(c, jobs, size, jobs.tp, 1.0, reduces=True, calls=1.0 + jobs.sequence_parallel)
    return jobs.tp_reductions_per_block * one * np.where(jobs.overlap_tp > 0, c.overlap_leak, 1.0)


def _context_parallel(c: TimeConstants, jobs: JobTable, tokens: Column, core: Column) -> tuple[Column, Column]:
    """Forward and backward: keys and values of all ranks go round beside attention's core (Ring Attention, arXiv
    2310.01889), and back with their gradients; or queries, keys and values are exchanged, and the output
    (DeepSpeed-Ulysses, arXiv 2309.14509), which nothing hides."""
    keys = jobs.compute_dtype_bytes * tokens * jobs.kv_heads * (jobs.head_dim + jobs.value_dim) / jobs.tp
    queries = jobs.compute_dtype_bytes * tokens * jobs.heads * (jobs.head_dim + jobs.value_dim) / jobs.tp
    hidden = np.where(jobs.comm_uses_compute_cores > 0, 0.0, 0.8 * core)
    ring = np.maximum(ring_seconds(c, jobs, keys * jobs.cp, jobs.cp, jobs.tp) - hidden, 0.0)
    swap = ring_seconds(c, jobs, keys + queries, jobs.cp, jobs.tp, calls=2.0)
    return np.where(jobs.ulysses > 0, swap, ring), np.where(jobs.ulysses > 0, swap, 2 * ring)
