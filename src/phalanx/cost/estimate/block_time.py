"""Time of a transformer block on one rank: its sublayers, recomputation, kernel launches and communication."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.estimate.block_activations import block_input_bytes
from phalanx.cost.estimate.collective_time import all_to_all_seconds, ring_seconds
from phalanx.cost.estimate.constants import TimeConstants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.estimate.kernel_time import memory_pass_seconds
from phalanx.cost.estimate.sublayer_time import (
    PassSeconds,
    SublayerTimes,
    adapter_times,
    attention_times,
    expert_exchange_seconds,
    expert_times,
    mlp_times,
)
from phalanx.cost.exact.flops import SELECTIVE_MATMUL_FRACTION
from phalanx.cost.kinds import CODES, Column, select_choice

ATTENTION_PRODUCTS = 4
NORMS_PER_BLOCK = 2
ADAPTER_OPERATIONS = 4
"""Operations of an adapter in the forward pass: two products, its scale and the sum."""
CAST_OPERATIONS = 12
"""Operations of a cast to float8 that is not compiled (`model.fp8.cast_rows`)."""


def _zero_seconds() -> Column:
    return np.zeros(1)


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """Seconds of one micro-batch in a stage, or in a part of a stage."""

    forward: Column
    backward: Column
    """Backward pass, including recomputation."""
    weight_grad: Column
    """Part of `backward`: gradients of weights, which split backward passes postpone."""
    exchange: Column = field(default_factory=_zero_seconds)
    """Part of both passes: exposed communication of tensor, context and expert parallelism."""
    sharding: Column = field(default_factory=_zero_seconds)
    """Part of both passes: exposed gathers of parameters and scatters of gradients (ZeRO-3)."""
    upload: Column = field(default_factory=_zero_seconds)
    """Part of both passes: exposed copies of offloaded parameters and activations."""

    @property
    def forward_backward(self) -> Column:
        """Seconds of both passes."""
        return self.forward + self.backward

    @property
    def compute(self) -> Column:
        """Seconds of both passes without exposed communication and copies."""
        return self.forward_backward - self.exchange - self.sharding - self.upload

    def __add__(self, other: StageTime) -> StageTime:
        return StageTime(**{part: getattr(self, part) + getattr(other, part) for part in _STAGE_PARTS})

    def __sub__(self, other: StageTime) -> StageTime:
        return self + other.scaled(-1.0)

    def scaled(self, count: Column | float) -> StageTime:
        """Return the seconds of `count` repetitions, one after another."""
        return StageTime(**{part: count * getattr(self, part) for part in _STAGE_PARTS})

    def replaced_where(self, condition: NDArray[np.bool_], other: StageTime) -> StageTime:
        """Return these times, with `other` in the rows where `condition` is true."""
        return StageTime(
            **{part: np.where(condition, getattr(other, part), getattr(self, part)) for part in _STAGE_PARTS}
        )


_STAGE_PARTS = tuple(part.name for part in fields(StageTime))


def block_seconds(constants: TimeConstants, jobs: JobTable) -> tuple[StageTime, StageTime]:
    """Return the times of a dense block and of a block with experts.

    Experts are evenly loaded. They take no time in a model without experts.
    """
    shared = attention_times(constants, jobs), adapter_times(constants, jobs)
    expert_exchange = expert_exchange_seconds(constants, jobs)
    return (
        _estimate_block_time(constants, jobs, *shared, mlp_times(constants, jobs), np.zeros(1), extra_operations=0),
        _estimate_block_time(
            constants, jobs, *shared, expert_times(constants, jobs), expert_exchange, extra_operations=20
        ),
    )


def _estimate_block_time(
    constants: TimeConstants,
    jobs: JobTable,
    attention: SublayerTimes,
    adapters: SublayerTimes,
    mlp: SublayerTimes,
    expert_exchange: Column,
    extra_operations: int,
) -> StageTime:
    """Return the seconds of a block: in each pass, the device and the host work at the same time.

        T_forward  = max(F + X_F, H)
        T_backward = max(B + X_B, r H)

    F and B are the device's passes, B with recomputation. X_F and X_B are the exposed communication of these passes. H
    is the time in which the host launches the operations of a forward pass, and r the relative number in backward. The
    maximum is `smooth_max`. There are fewer operations in fused kernels, and more with communication.
    """
    fusion_factor = np.where(jobs.compiled > 0, 0.6, np.where(jobs.fused_elementwise > 0, 0.75, 1.0))
    num_casts = 2 * (ATTENTION_PRODUCTS + jobs.mlp_matrices) * jobs.casts_to_fp8 * (jobs.compiled == 0)
    num_unfused = constants.operations + ADAPTER_OPERATIONS * jobs.adapted_products
    num_operations = num_unfused * fusion_factor + 4 * (jobs.tp > 1) + CAST_OPERATIONS * num_casts
    device = _device_seconds(constants, jobs, attention, adapters, mlp, num_operations * constants.gap_seconds / 2)
    launch_factor = constants.of_generation("launch", jobs.hardware_generation, oldest=1.0)
    host_forward = (num_operations + extra_operations) * constants.launch_seconds * launch_factor
    host_backward = host_forward * (1.5 + _recomputes_full_blocks(jobs))
    weight_grad = _weight_grad_seconds(jobs, attention, adapters, mlp)
    exchange = _exposed_exchange_seconds(constants, jobs, attention.core.forward, weight_grad, expert_exchange)
    forward = smooth_max(device.forward + exchange.forward, host_forward)
    backward = smooth_max(device.backward + exchange.backward, host_backward)
    without_exchange = smooth_max(device.forward, host_forward) + smooth_max(device.backward, host_backward)
    return StageTime(
        forward=forward,
        backward=backward,
        weight_grad=weight_grad,
        exchange=forward + backward - without_exchange,
    )


def _weight_grad_seconds(
    jobs: JobTable, attention: SublayerTimes, adapters: SublayerTimes, mlp: SublayerTimes
) -> Column:
    """Return the seconds of the gradients of a block's weights, of which a run may freeze some."""
    return jobs.weight_gradient_share * (attention.weight_grad + mlp.weight_grad) + adapters.weight_grad


def _device_seconds(
    constants: TimeConstants,
    jobs: JobTable,
    attention: SublayerTimes,
    adapters: SublayerTimes,
    mlp: SublayerTimes,
    gap_seconds: Column,
) -> PassSeconds:
    """Return the seconds of a block's operations on the device, in backward including recomputation."""
    pass_seconds = attention.memory_passes + mlp.memory_passes
    products = attention.forward + adapters.forward + mlp.forward
    forward = products + attention.core.forward + pass_seconds + gap_seconds
    backward = (
        attention.input_grad
        + adapters.input_grad
        + mlp.input_grad
        + _weight_grad_seconds(jobs, attention, adapters, mlp)
        + attention.core.backward
        + pass_seconds * constants.backward_passes
        + 2 * gap_seconds
    )
    repeated_products = SELECTIVE_MATMUL_FRACTION * products
    norm_seconds = memory_pass_seconds(constants, jobs, 2 * block_input_bytes(jobs)) + constants.gap_seconds
    recomputed = select_choice(
        jobs.recompute,
        {
            "full": forward,
            "offload": forward,
            "attention core": np.where(jobs.uses_flash_attention, 0.0, attention.core.forward),
            "operations": np.where(jobs.zero_stage >= 3, repeated_products, 0.0) + pass_seconds,
            "selective": attention.forward + attention.core.forward,
            # Each norm reads and writes the residual stream.
            "norms": NORMS_PER_BLOCK * norm_seconds,
        },
        0.0,
    )
    return PassSeconds(forward, backward + recomputed)


def _recomputes_full_blocks(jobs: JobTable) -> NDArray[np.bool_]:
    """Return the rows whose backward pass repeats all operations of a block."""
    return np.isin(jobs.recompute, (CODES["full"], CODES["offload"]))


def _exposed_exchange_seconds(
    constants: TimeConstants, jobs: JobTable, core: Column, weight_grad: Column, expert_seconds: Column
) -> PassSeconds:
    """Return the exposed communication of both passes, in backward including recomputation.

    `core` hides context-parallel messages, and `weight_grad` those of tensor parallelism. A tensor-parallel pass has an
    all-reduce after attention and one after the MLP. With sequence parallelism, each of these is an all-gather and a
    reduce-scatter (arXiv 2205.05198, section 4.2.2).
    """
    cp_seconds = _context_parallel_seconds(constants, jobs, core)
    size_bytes = jobs.compute_dtype_bytes * jobs.tokens * jobs.width
    calls = 1.0 + jobs.sequence_parallel
    reduction_seconds = ring_seconds(constants, jobs, size_bytes, jobs.tp, stride=1.0, all_reduce=True, calls=calls)
    exposed_fraction = np.where(jobs.overlap_tp > 0, constants.overlap_leak, 1.0)
    tp_seconds = jobs.tp_reductions_per_block * reduction_seconds * exposed_fraction
    hidden_seconds = np.where(
        (jobs.overlap_tp_with_weight_grads > 0) & jobs.can_overlap,
        (1 - constants.overlap_leak) * np.minimum(tp_seconds, weight_grad),
        0.0,
    )
    forward = tp_seconds + expert_seconds + cp_seconds.forward
    recomputed = np.select(
        [_recomputes_full_blocks(jobs), jobs.recompute == CODES["selective"]],
        [forward, tp_seconds / jobs.tp_reductions_per_block + cp_seconds.forward],
        0.0,
    )
    return PassSeconds(forward, tp_seconds - hidden_seconds + expert_seconds + cp_seconds.backward + recomputed)


def smooth_max(device: Column, other: Column, sharpness: int = 4) -> Column:
    """Return the longer of two times, plus a margin where similar times hide each other incompletely.

    The margin of this norm is smaller for a larger exponent `sharpness`.
    """
    return (device**sharpness + other**sharpness) ** (1 / sharpness)


def _context_parallel_seconds(constants: TimeConstants, jobs: JobTable, core: Column) -> PassSeconds:
    """Return the exposed seconds of context parallelism, in a ring beyond the time of attention's core.

    Ring Attention (arXiv 2310.01889): ranks exchange keys and values in a ring during attention's core, and in the
    backward pass also their gradients. DeepSpeed-Ulysses (arXiv 2309.14509): ranks exchange queries, keys, values and
    the output, and nothing hides these exchanges. If there are more ranks than key/value heads, ranks get copies of
    these heads.
    """
    kv_heads = np.maximum(jobs.kv_heads / jobs.tp, np.where(jobs.ulysses > 0, jobs.cp, 1))
    head_bytes = jobs.compute_dtype_bytes * jobs.tokens * (jobs.head_dim + jobs.value_dim)
    kv_bytes = head_bytes * kv_heads
    query_bytes = head_bytes * jobs.heads / jobs.tp
    hidden_seconds = np.where(jobs.can_overlap, 0.8 * core, 0.0)
    kv_seconds = ring_seconds(constants, jobs, kv_bytes * jobs.cp, jobs.cp, stride=jobs.tp, neighbor_sends=True)
    gradient_seconds = kv_seconds * jobs.ring_gradient_bytes / jobs.compute_dtype_bytes
    ring_forward = np.maximum(kv_seconds - hidden_seconds, 0.0)
    ring_backward = np.maximum(kv_seconds + gradient_seconds - 2 * hidden_seconds, 0.0)
    ulysses_seconds = all_to_all_seconds(constants, jobs, kv_bytes + query_bytes, jobs.cp, stride=jobs.tp, calls=2.0)
    is_ulysses = jobs.ulysses > 0
    return PassSeconds(
        np.where(is_ulysses, ulysses_seconds, ring_forward),
        np.where(is_ulysses, ulysses_seconds, ring_backward),
    )
