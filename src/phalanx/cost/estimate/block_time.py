"""Time of a transformer block on one rank: products, attention, memory passes and communication."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.estimate.collective_time import (
    all_to_all_seconds,
    expert_all_to_all_seconds,
    ring_seconds,
)
from phalanx.cost.estimate.constants import TimeConstants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.estimate.kernel_time import attention_seconds, by_generation, linear_seconds, memory_pass_seconds
from phalanx.cost.exact.flops import SELECTIVE_MATMUL_FRACTION
from phalanx.cost.kinds import RECOMPUTING_METHODS, ActivationCheckpointing, AttentionKernel, Column


def _no_seconds() -> Column:
    return np.zeros(1)


@dataclass(frozen=True)
class StageTime:
    """Seconds of one micro-batch in a stage, or in a part of a stage."""

    forward: Column
    backward: Column
    """Backward pass, including recomputation."""
    weight_grad: Column
    """Part of `backward`: gradients of weights, which split backward passes postpone."""
    exchange: Column = field(default_factory=_no_seconds)
    """Part of both passes: exposed communication of tensor, context and expert parallelism."""
    sharding: Column = field(default_factory=_no_seconds)
    """Part of both passes: exposed gathers of parameters and scatters of gradients (ZeRO-3)."""
    upload: Column = field(default_factory=_no_seconds)
    """Part of both passes: exposed copies of offloaded parameters to the device."""

    @property
    def forward_backward(self) -> Column:
        """Seconds of both passes."""
        return self.forward + self.backward

    @property
    def compute(self) -> Column:
        """Seconds of both passes without exposed communication and copies."""
        return self.forward_backward - self.exchange - self.sharding - self.upload

    def __add__(self, other: StageTime) -> StageTime:
        return StageTime(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: StageTime) -> StageTime:
        return self + other.scaled(-1.0)

    def scaled(self, count: Column | float) -> StageTime:
        """Return the seconds of `count` repetitions, one after another."""
        return StageTime(*(count * getattr(self, f.name) for f in fields(self)))

    def replaced_where(self, condition: NDArray[np.bool_], other: StageTime) -> StageTime:
        """Return these times, with `other` in the rows where `condition` is true."""
        return StageTime(*(np.where(condition, getattr(other, f.name), getattr(self, f.name)) for f in fields(self)))


def block_seconds(constants: TimeConstants, jobs: JobTable) -> tuple[StageTime, StageTime]:
    """Return the times of a dense block and of a block with experts.

    Experts are evenly loaded. They take no time in a model without experts.
    """
    tokens = jobs.tokens
    attention = _attention_times(constants, jobs, tokens)
    dense = _block_time(
        constants,
        jobs,
        tokens,
        attention=attention,
        mlp=_mlp_times(constants, jobs, tokens),
        exchange_seconds=np.zeros(1),
        extra_operations=0,
    )
    has_experts = jobs.experts > 0
    sent_bytes = jobs.compute_dtype_bytes * tokens * jobs.width * jobs.top_k / jobs.tp
    exposed_fraction = np.where(jobs.overlap_ep > 0, constants.overlap_leak, 1.0)
    exchange = np.where(has_experts, 2 * expert_all_to_all_seconds(constants, jobs, sent_bytes) * exposed_fraction, 0.0)
    return dense, _block_time(
        constants,
        jobs,
        tokens,
        attention=attention,
        mlp=_expert_times(constants, jobs, tokens),
        exchange_seconds=exchange,
        extra_operations=20,
    )


@dataclass(frozen=True)
class _SublayerTimes:
    """Seconds of a sublayer: forward, gradients of inputs and of weights, memory passes, attention's core."""

    forward: Column
    inputs: Column
    weights: Column
    passes: Column
    core: tuple[Column, Column] = (np.zeros(1), np.zeros(1))


def _attention_times(constants: TimeConstants, jobs: JobTable, tokens: Column) -> _SublayerTimes:
    D = jobs.width
    inner_width = jobs.heads * jobs.value_dim / jobs.tp
    input_projection = linear_seconds(
        constants, jobs, tokens, n=np.maximum(jobs.attention_parameters / D / jobs.tp - inner_width, 64), k=D
    )
    output_projection = linear_seconds(constants, jobs, tokens, n=D, k=inner_width)
    forward, inputs, weights = (a + b for a, b in zip(input_projection, output_projection, strict=True))
    separate_norms = (jobs.mlp_matrices > 2) & (jobs.fused_elementwise == 0) & (jobs.compiled == 0)
    sequence_shards = np.where(jobs.sequence_parallel > 0, jobs.tp, 1.0)
    compile_factor = _compile_factor(constants, jobs)
    width_passes = (
        constants.width_passes * compile_factor + np.where(separate_norms, constants.norm_passes, 0.0)
    ) / sequence_shards
    pass_seconds = memory_pass_seconds(
        constants,
        jobs,
        jobs.compute_dtype_bytes * tokens * D * (width_passes + constants.shared_passes * compile_factor / jobs.tp),
    )
    return _SublayerTimes(forward, inputs, weights, passes=pass_seconds, core=attention_seconds(constants, jobs))


def _compile_factor(constants: TimeConstants, jobs: JobTable) -> Column:
    """Return the fraction of the memory passes that remain with torch.compile."""
    fraction: Column = np.where(jobs.compiled > 0, constants.compiled, 1.0)
    return fraction


def _mlp_times(constants: TimeConstants, jobs: JobTable, tokens: Column) -> _SublayerTimes:
    up = linear_seconds(constants, jobs, tokens, n=jobs.ffn * (jobs.mlp_matrices - 1) / jobs.tp, k=jobs.width)
    down = linear_seconds(constants, jobs, tokens, n=jobs.width, k=jobs.ffn / jobs.tp)
    compile_factor = _compile_factor(constants, jobs)
    inner_passes = jobs.ffn * (jobs.mlp_matrices - 1) / jobs.tp * constants.inner_passes * compile_factor
    forward, inputs, weights = (a + b for a, b in zip(up, down, strict=True))
    return _SublayerTimes(
        forward,
        inputs,
        weights,
        passes=memory_pass_seconds(constants, jobs, jobs.compute_dtype_bytes * tokens * inner_passes),
    )


def _expert_times(constants: TimeConstants, jobs: JobTable, tokens: Column) -> _SublayerTimes:
    """Return the times of full experts; tensor-parallel ranks share the tokens that go to them."""
    num_experts = np.maximum(jobs.experts, 1)
    D = jobs.width
    local_experts = num_experts / jobs.ep
    ffn = np.maximum(jobs.expert_ffn, 1)
    shared_ffn = np.maximum(jobs.shared_ffn, 1) / jobs.tp
    token_copies = tokens * jobs.top_k / jobs.tp
    tokens_per_expert = token_copies * jobs.ep / num_experts
    up = linear_seconds(constants, jobs, tokens_per_expert, n=2 * ffn, k=D, batch=local_experts)
    down = linear_seconds(constants, jobs, tokens_per_expert, n=D, k=ffn, batch=local_experts)
    shared_up = linear_seconds(constants, jobs, tokens, n=2 * shared_ffn, k=D)
    shared_down = linear_seconds(constants, jobs, tokens, n=D, k=shared_ffn)
    has_experts = jobs.experts > 0
    has_shared = jobs.shared_ffn > 0
    forward, inputs, weights = (
        np.where(has_experts, a + b, 0.0) + np.where(has_shared, p + q, 0.0)
        for a, b, p, q in zip(up, down, shared_up, shared_down, strict=True)
    )
    compile_factor = _compile_factor(constants, jobs)
    inner_passes = (
        2
        * (token_copies * jobs.expert_ffn + tokens * jobs.shared_ffn / jobs.tp)
        * constants.inner_passes
        * compile_factor
    )
    pass_seconds = memory_pass_seconds(
        constants, jobs, jobs.compute_dtype_bytes * (inner_passes + token_copies * D * constants.route_passes)
    )
    return _SublayerTimes(forward, inputs, weights, passes=pass_seconds)


def _block_time(
    constants: TimeConstants,
    jobs: JobTable,
    tokens: Column,
    attention: _SublayerTimes,
    mlp: _SublayerTimes,
    exchange_seconds: Column,
    extra_operations: int,
) -> StageTime:
    core, core_backward = attention.core
    operations = constants.operations * np.where(
        jobs.compiled > 0, 0.6, np.where(jobs.fused_elementwise > 0, 0.75, 1.0)
    )
    operations = operations + 4 * (jobs.tp > 1)
    gap_seconds = operations * constants.gap_seconds / 2
    pass_seconds = attention.passes + mlp.passes
    weights = attention.weights + mlp.weights
    forward = attention.forward + mlp.forward + core + pass_seconds + gap_seconds
    backward = (
        attention.inputs
        + mlp.inputs
        + weights
        + core_backward
        + pass_seconds * constants.backward_passes
        + 2 * gap_seconds
    )

    forward_exchange, backward_exchange = _exchange_seconds(
        constants, jobs, tokens, core=core, weights=weights, expert_seconds=exchange_seconds
    )

    is_flash = jobs.attention >= AttentionKernel.FLASH_1
    recomputed_products = SELECTIVE_MATMUL_FRACTION * (attention.forward + mlp.forward)
    recomputed_operations = np.where(jobs.zero_stage >= 3, recomputed_products, 0.0) + pass_seconds
    recompute_seconds = np.select(
        [jobs.recompute == kind for kind in RECOMPUTING_METHODS],
        [forward, np.where(is_flash, 0.0, core), recomputed_operations, attention.forward + core],
        0.0,
    )
    host_seconds = (
        (operations + extra_operations)
        * constants.launch_seconds
        * by_generation(jobs, 1.0, constants.launch_1, third=constants.launch_2)
    )
    host_backward_ratio = 1.5 + (jobs.recompute == ActivationCheckpointing.FULL)
    backward = backward + recompute_seconds
    host_backward_seconds = host_seconds * host_backward_ratio
    whole_forward = smooth_max(forward + forward_exchange, host_seconds)
    whole_backward = smooth_max(backward + backward_exchange, host_backward_seconds)
    alone = smooth_max(forward, host_seconds) + smooth_max(backward, host_backward_seconds)
    return StageTime(whole_forward, whole_backward, weights, exchange=whole_forward + whole_backward - alone)


def _exchange_seconds(
    constants: TimeConstants, jobs: JobTable, tokens: Column, core: Column, weights: Column, expert_seconds: Column
) -> tuple[Column, Column]:
    """Return the exposed communication of the forward pass, and of backward including recomputation."""
    cp_forward, cp_backward = _context_parallel_seconds(constants, jobs, tokens, core=core)
    tp_seconds = _tensor_parallel_seconds(constants, jobs, tokens)
    hidden_seconds = np.where(
        (jobs.overlap_tp_with_weight_grads > 0) & (jobs.comm_uses_compute_cores == 0),
        (1 - constants.overlap_leak) * np.minimum(tp_seconds, weights),
        0.0,
    )
    forward = tp_seconds + expert_seconds + cp_forward
    recomputed = np.select(
        [jobs.recompute == ActivationCheckpointing.FULL, jobs.recompute == ActivationCheckpointing.ATTENTION],
        [forward, tp_seconds / jobs.tp_reductions_per_block + cp_forward],
        0.0,
    )
    return forward, tp_seconds - hidden_seconds + expert_seconds + cp_backward + recomputed


def smooth_max(device: Column, other: Column, sharpness: int = 4) -> Column:
    """Return the longer of two times, plus a margin where similar times hide each other incompletely.

    Args:
        device: Times of the device, in any unit.
        other: Times of the host or of communication, in the same unit.
        sharpness: Exponent of the norm; the margin is smaller for larger values.
    """
    return (device**sharpness + other**sharpness) ** (1 / sharpness)


def _tensor_parallel_seconds(constants: TimeConstants, jobs: JobTable, tokens: Column) -> Column:
    """Return the seconds of a pass's tensor-parallel communication.

    A pass has an all-reduce after attention and one after the MLP. With sequence parallelism, each of these is an
    all-gather and a reduce-scatter (arXiv 2205.05198, section 4.2.2).
    """
    size_bytes = jobs.compute_dtype_bytes * tokens * jobs.width
    reduction_seconds = ring_seconds(
        constants, jobs, size_bytes, ranks=jobs.tp, stride=1.0, reduces=True, calls=1.0 + jobs.sequence_parallel
    )
    return jobs.tp_reductions_per_block * reduction_seconds * np.where(jobs.overlap_tp > 0, constants.overlap_leak, 1.0)


def _context_parallel_seconds(
    constants: TimeConstants, jobs: JobTable, tokens: Column, core: Column
) -> tuple[Column, Column]:
    """Return the exposed seconds of context parallelism, forward and backward.

    Ring Attention (arXiv 2310.01889): ranks exchange keys and values in a ring during attention's core, and in the
    backward pass also their gradients. DeepSpeed-Ulysses (arXiv 2309.14509): ranks exchange queries, keys, values and
    the output, and nothing hides these exchanges. If there are more ranks than key/value heads, ranks get copies of
    these heads.
    """
    kv_heads = np.maximum(jobs.kv_heads / jobs.tp, np.where(jobs.ulysses > 0, jobs.cp, 1))
    head_bytes = jobs.compute_dtype_bytes * tokens * (jobs.head_dim + jobs.value_dim)
    kv_bytes = head_bytes * kv_heads
    query_bytes = head_bytes * jobs.heads / jobs.tp
    hidden_seconds = np.where(jobs.comm_uses_compute_cores > 0, 0.0, 0.8 * core)
    kv_seconds = ring_seconds(constants, jobs, kv_bytes * jobs.cp, ranks=jobs.cp, stride=jobs.tp, sends=True)
    gradient_seconds = kv_seconds * jobs.ring_gradient_bytes / jobs.compute_dtype_bytes
    ring_forward = np.maximum(kv_seconds - hidden_seconds, 0.0)
    ring_backward = np.maximum(kv_seconds + gradient_seconds - 2 * hidden_seconds, 0.0)
    ulysses_seconds = all_to_all_seconds(
        constants, jobs, kv_bytes + query_bytes, ranks=jobs.cp, stride=jobs.tp, calls=2.0
    )
    is_ulysses = jobs.ulysses > 0
    return np.where(is_ulysses, ulysses_seconds, ring_forward), np.where(is_ulysses, ulysses_seconds, ring_backward)
