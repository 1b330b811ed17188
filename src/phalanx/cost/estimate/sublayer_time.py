"""Time of the parts of a transformer block on one rank: attention, the dense MLP and experts.

All functions compute columns of many jobs at once (`cost.estimate.job_table`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from phalanx.cost.estimate.collective_time import expert_all_to_all_seconds
from phalanx.cost.estimate.constants import TimeConstants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.estimate.kernel_time import attention_seconds, linear_seconds, memory_pass_seconds
from phalanx.cost.kinds import Column


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of a forward pass and of a backward pass."""

    forward: Column
    backward: Column


@dataclass(frozen=True, kw_only=True)
class SublayerTimes:
    """Seconds of a sublayer's products, of its memory passes in forward, and of attention's core."""

    forward: Column
    input_grad: Column
    weight_grad: Column
    memory_passes: Column
    core: PassSeconds = PassSeconds(np.zeros(1), np.zeros(1))


def attention_times(constants: TimeConstants, jobs: JobTable) -> SublayerTimes:
    """Return the times of attention: projections, core, norms and residuals."""
    D = jobs.width
    inner_width = jobs.heads * jobs.value_dim / jobs.tp
    input_width = np.maximum(jobs.attention_parameters / D / jobs.tp - inner_width, 64)
    input_projection = linear_seconds(constants, jobs, jobs.tokens, n=input_width, k=D, readers=3)
    output_projection = linear_seconds(constants, jobs, jobs.tokens, n=D, k=inner_width)
    forward, input_grad, weight_grad = (a + b for a, b in zip(input_projection, output_projection, strict=True))
    return SublayerTimes(
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        memory_passes=_residual_pass_seconds(constants, jobs),
        core=PassSeconds(*attention_seconds(constants, jobs)),
    )


def _residual_pass_seconds(constants: TimeConstants, jobs: JobTable) -> Column:
    """Return the seconds of the memory passes over the residual stream and attention's shared tensors."""
    separate_norms = (jobs.mlp_matrices > 2) & (jobs.fused_elementwise == 0) & (jobs.compiled == 0)
    sequence_shards = np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    compile_factor = _compile_factor(constants, jobs)
    width_passes = (
        constants.width_passes * compile_factor + np.where(separate_norms, constants.norm_passes, 0.0)
    ) / sequence_shards
    passes = width_passes + constants.shared_passes * compile_factor / jobs.tp
    return memory_pass_seconds(constants, jobs, jobs.compute_dtype_bytes * jobs.tokens * jobs.width * passes)


def _compile_factor(constants: TimeConstants, jobs: JobTable) -> Column:
    """Return the fraction of the memory passes that remain with torch.compile."""
    fraction: Column = np.where(jobs.compiled > 0, constants.compiled, 1.0)
    return fraction


def mlp_times(constants: TimeConstants, jobs: JobTable) -> SublayerTimes:
    """Return the times of a dense MLP."""
    num_up = jobs.mlp_matrices - 1
    up = linear_seconds(constants, jobs, jobs.tokens, n=jobs.ffn * num_up / jobs.tp, k=jobs.width, readers=num_up)
    down = linear_seconds(constants, jobs, jobs.tokens, n=jobs.width, k=jobs.ffn / jobs.tp)
    compile_factor = _compile_factor(constants, jobs)
    inner_passes = jobs.ffn * (jobs.mlp_matrices - 1) / jobs.tp * constants.inner_passes * compile_factor
    forward, input_grad, weight_grad = (a + b for a, b in zip(up, down, strict=True))
    return SublayerTimes(
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        memory_passes=memory_pass_seconds(constants, jobs, jobs.compute_dtype_bytes * jobs.tokens * inner_passes),
    )


def expert_times(constants: TimeConstants, jobs: JobTable) -> SublayerTimes:
    """Return the times of routed and shared experts, whose MLPs are gated."""
    routed = _routed_expert_seconds(constants, jobs)
    shared = _shared_expert_seconds(constants, jobs)
    forward, input_grad, weight_grad = (a + b for a, b in zip(routed, shared, strict=True))
    return SublayerTimes(
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        memory_passes=_expert_pass_seconds(constants, jobs),
    )


def _token_copies(jobs: JobTable) -> Column:
    """Return the copies of a rank's tokens that go to experts; tensor-parallel ranks share the tokens."""
    return jobs.tokens * jobs.top_k / jobs.tp


def _routed_expert_seconds(constants: TimeConstants, jobs: JobTable) -> Iterator[Column]:
    """Yield the seconds of a rank's full experts as `linear_seconds` returns them."""
    num_experts = np.maximum(jobs.experts, 1)
    local_experts = num_experts / jobs.ep
    tokens_per_expert = _token_copies(jobs) * jobs.ep / num_experts
    ffn = np.maximum(jobs.expert_ffn, 1)
    up = linear_seconds(constants, jobs, tokens_per_expert, n=2 * ffn, k=jobs.width, batch=local_experts, readers=2)
    down = linear_seconds(constants, jobs, tokens_per_expert, n=jobs.width, k=ffn, batch=local_experts)
    return (np.where(jobs.experts > 0, a + b, 0.0) for a, b in zip(up, down, strict=True))


def _shared_expert_seconds(constants: TimeConstants, jobs: JobTable) -> Iterator[Column]:
    """Yield the seconds of the shared experts as `linear_seconds` returns them; each rank has a shard of them."""
    shared_ffn = np.maximum(jobs.shared_ffn, 1) / jobs.tp
    up = linear_seconds(constants, jobs, jobs.tokens, n=2 * shared_ffn, k=jobs.width, readers=2)
    down = linear_seconds(constants, jobs, jobs.tokens, n=jobs.width, k=shared_ffn)
    return (np.where(jobs.shared_ffn > 0, a + b, 0.0) for a, b in zip(up, down, strict=True))


def _expert_pass_seconds(constants: TimeConstants, jobs: JobTable) -> Column:
    """Return the seconds of the memory passes over the inner width of experts and over the copies of tokens."""
    token_copies = _token_copies(jobs)
    inner_elements = token_copies * jobs.expert_ffn + jobs.tokens * jobs.shared_ffn / jobs.tp
    inner_passes = 2 * inner_elements * constants.inner_passes * _compile_factor(constants, jobs)
    route_passes = token_copies * jobs.width * constants.route_passes
    return memory_pass_seconds(constants, jobs, jobs.compute_dtype_bytes * (inner_passes + route_passes))


def expert_exchange_seconds(constants: TimeConstants, jobs: JobTable) -> Column:
    """Return the exposed seconds of a pass's two all-to-alls, to the experts and back; 0 without experts."""
    sent_bytes = jobs.compute_dtype_bytes * jobs.tokens * jobs.width * jobs.top_k / jobs.tp
    exposed_fraction = np.where(jobs.overlap_ep > 0, constants.overlap_leak, 1.0)
    exchange_seconds = 2 * expert_all_to_all_seconds(constants, jobs, sent_bytes) * exposed_fraction
    return np.where(jobs.experts > 0, exchange_seconds, 0.0)
