"""Time of the parts of a transformer block on one rank: attention, the dense MLP and experts.

All functions compute columns of many jobs at once (`cost.estimate.job_table`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.estimate.collective_time import expert_all_to_all_seconds
from phalanx.cost.estimate.constants import TimeConstants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.estimate.kernel_time import (
    LinearSeconds,
    attention_seconds,
    linear_seconds,
    matmul_seconds,
    memory_pass_seconds,
)
from phalanx.cost.kinds import Column


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of a forward pass and of a backward pass."""

    forward: Column
    backward: Column


@dataclass(frozen=True)
class SublayerTimes:
    """Seconds of a sublayer's matrix products, of the memory passes in its forward pass, and of attention's core."""

    forward: Column
    input_grad: Column
    weight_grad: Column
    memory_passes: Column
    core: PassSeconds = PassSeconds(np.zeros(1), np.zeros(1))


def attention_times(constants: TimeConstants, jobs: JobTable) -> SublayerTimes:
    """Return the times of attention: projections, core, norms and residuals."""
    inner_width = jobs.heads * jobs.value_dim / jobs.tp
    input_width = np.maximum(jobs.attention_parameters / jobs.width / jobs.tp - inner_width, 64)
    inputs = linear_seconds(constants, jobs, jobs.tokens, input_width, jobs.width, readers=3)
    output = linear_seconds(constants, jobs, jobs.tokens, jobs.width, inner_width)
    runs_separate_norms = jobs.is_gated & ~jobs.is_fused
    compile_factor = _remaining_pass_fraction(constants, jobs)
    width_passes = constants.width_passes * compile_factor + np.where(runs_separate_norms, constants.norm_passes, 0.0)
    passes = width_passes / jobs.sequence_shards + constants.shared_passes * compile_factor / jobs.tp
    pass_bytes = jobs.compute_dtype_bytes * jobs.tokens * jobs.width * passes
    core = PassSeconds(*attention_seconds(constants, jobs))
    return SublayerTimes(*_add_layer_seconds(inputs, output), memory_pass_seconds(constants, jobs, pass_bytes), core)


def mlp_times(constants: TimeConstants, jobs: JobTable) -> SublayerTimes:
    """Return the times of a dense MLP."""
    num_up = jobs.mlp_matrices - 1
    up = linear_seconds(constants, jobs, jobs.tokens, jobs.ffn * num_up / jobs.tp, jobs.width, readers=num_up)
    down = linear_seconds(constants, jobs, jobs.tokens, jobs.width, jobs.ffn / jobs.tp)
    passes = jobs.ffn * num_up / jobs.tp * constants.inner_passes * _remaining_pass_fraction(constants, jobs)
    pass_bytes = jobs.compute_dtype_bytes * jobs.tokens * passes
    return SublayerTimes(*_add_layer_seconds(up, down), memory_pass_seconds(constants, jobs, pass_bytes))


def expert_times(constants: TimeConstants, jobs: JobTable) -> SublayerTimes:
    """Return the times of routed and shared experts, whose MLPs are gated.

    A rank has full routed experts, and a shard of the shared ones. Tensor-parallel ranks share the tokens.
    """
    token_copies = jobs.tokens * jobs.top_k / jobs.tp
    num_experts = np.maximum(jobs.experts, 1)
    local_experts = num_experts / jobs.ep
    tokens_per_expert = token_copies * jobs.ep / num_experts
    ffn = np.maximum(jobs.expert_ffn, 1)
    up = linear_seconds(constants, jobs, tokens_per_expert, 2 * ffn, jobs.width, batch=local_experts, readers=2)
    down = linear_seconds(constants, jobs, tokens_per_expert, jobs.width, ffn, batch=local_experts)
    routed = _add_layer_seconds(up, down, jobs.experts > 0)
    shared_ffn = np.maximum(jobs.shared_ffn, 1) / jobs.tp
    up = linear_seconds(constants, jobs, jobs.tokens, 2 * shared_ffn, jobs.width, readers=2)
    down = linear_seconds(constants, jobs, jobs.tokens, jobs.width, shared_ffn)
    shared = _add_layer_seconds(up, down, jobs.shared_ffn > 0)
    inner_elements = token_copies * jobs.expert_ffn + jobs.tokens * jobs.shared_ffn / jobs.tp
    inner_passes = 2 * inner_elements * constants.inner_passes * _remaining_pass_fraction(constants, jobs)
    route_passes = token_copies * jobs.width * constants.route_passes
    pass_bytes = jobs.compute_dtype_bytes * (inner_passes + route_passes)
    return SublayerTimes(*_add_layer_seconds(routed, shared), memory_pass_seconds(constants, jobs, pass_bytes))


def adapter_times(constants: TimeConstants, jobs: JobTable) -> SublayerTimes:
    """Return the times of the low-rank adapters of a block: y + s B A x of each adapted product, y = W x.

    Products with a rank of some tens read or write many numbers for few operations, so the roofline of `matmul_seconds`
    gives them the time of their memory accesses. The sum of outputs, and in the backward pass that of the gradients of
    x, reads two tensors and writes one. With DoRA (arXiv 2402.09353), outputs are scaled once more, and the norms of
    rows need a pass over W for its squares, and one for W A^T (`model.products.adapted_row_norms`).
    """
    count = np.maximum(jobs.adapted_products, 1)
    rank = jobs.adapter_rank
    inputs = jobs.adapted_inputs / jobs.tp
    outputs = jobs.adapted_outputs / jobs.tp

    def product_seconds(m: Column, n: Column, k: Column) -> Column:
        return jobs.adapted_products * matmul_seconds(constants, jobs, m, n, k, linear=False)

    def pass_seconds(numbers: Column) -> Column:
        return memory_pass_seconds(constants, jobs, jobs.compute_dtype_bytes * numbers)

    x = inputs / count
    y = outputs / count
    tokens = jobs.tokens
    fraction = _remaining_pass_fraction(constants, jobs)
    has_magnitudes = jobs.magnitude_weights > 0
    norms = pass_seconds(2 * jobs.magnitude_weights / jobs.tp)
    return SublayerTimes(
        forward=product_seconds(tokens, rank, x)
        + product_seconds(tokens, y, rank)
        + pass_seconds(fraction * tokens * outputs * (3 + 2 * has_magnitudes))
        + norms,
        input_grad=product_seconds(tokens, rank, y)
        + product_seconds(tokens, x, rank)
        + pass_seconds(fraction * tokens * (3 * inputs + 3 * outputs * has_magnitudes)),
        weight_grad=product_seconds(rank, x, tokens) + product_seconds(y, rank, tokens),
        memory_passes=np.zeros(1),
    )


def _add_layer_seconds(
    first: LinearSeconds, second: LinearSeconds, exist: bool | NDArray[np.bool_] = True
) -> LinearSeconds:
    """Return the sum of the seconds of two layers, in the rows where they exist."""
    forward, input_grad, weight_grad = (np.where(exist, a + b, 0.0) for a, b in zip(first, second, strict=True))
    return forward, input_grad, weight_grad


def _remaining_pass_fraction(constants: TimeConstants, jobs: JobTable) -> Column:
    """Return the fraction of the memory passes that remain with torch.compile."""
    return np.where(jobs.compiled > 0, constants.compiled, 1.0)


def expert_exchange_seconds(constants: TimeConstants, jobs: JobTable) -> Column:
    """Return the exposed seconds of a pass's two all-to-alls, to the experts and back; 0 without experts."""
    sent_bytes = jobs.compute_dtype_bytes * jobs.tokens * jobs.width * jobs.top_k / jobs.tp
    exposed_fraction = np.where(jobs.overlap_ep > 0, constants.overlap_leak, 1.0)
    exchange_seconds = 2 * expert_all_to_all_seconds(constants, jobs, sent_bytes) * exposed_fraction
    return np.where(jobs.experts > 0, exchange_seconds, 0.0)
