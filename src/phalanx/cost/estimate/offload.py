"""Memory savings and time of offload: offloaded bytes, transferred bytes, and the update on a CPU.

Offload of activations copies the inputs of recomputed blocks to the host in the forward pass, and back to the device
in the backward pass.

The formulas follow Phalanx's strategies. ZeRO-1 and 2 (`parallel.data.zero`) copy gradients to the host, step their
rows in pieces and copy the rows back, one after another. Only the gather of the previous piece overlaps with this.
ZeRO-3 (FSDP2's CPUOffloadPolicy) prefetches a block's parameters to the device before each gather. It copies the first
micro-batch's gradients to the host during the backward pass; later micro-batches wait for the addition. Muon's
products, which are slow on a CPU, are not included. The efficiencies and the speed below are usual values, not
measurements.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from phalanx.cost.estimate.block_activations import block_input_bytes, offloads_inputs
from phalanx.cost.estimate.block_time import StageTime
from phalanx.cost.estimate.constants import TimeConstants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.estimate.kernel_time import memory_pass_seconds
from phalanx.cost.kinds import CODES, Column, select_choice
from phalanx.cost.precision import master_weight_bytes
from phalanx.spec.parts.operations import NF4_BLOCK, NF4_BLOCK_BYTES

PINNED_COPY_EFFICIENCY = 0.8
"""Fraction of PCIe's bandwidth that copies with pinned memory reach: 25 of Gen4's 31.5 GB/s."""
MAX_UNPINNED_BYTES_PER_SECOND = 10e9
"""Maximum bandwidth of copies without pinned memory, which the driver stages with one core.

Rows of another precision than the model's are unpinned, because the cast for the copy creates an unpinned tensor.
"""
HOST_MEMORY_EFFICIENCY = 0.8
"""Fraction of CPU memory's bandwidth that passes over long tensors reach."""


def device_state_bytes(jobs: JobTable) -> tuple[Column, Column, Column]:
    """Return the bytes per parameter that stay on the device: parameters, gradients, optimizer state.

    Frozen parameters have only the first."""
    is_offloaded = jobs.offload > 0
    return (
        np.where(is_offloaded & (jobs.zero_stage >= 3), 0.0, _weight_bytes(jobs)),
        np.where(is_offloaded & (jobs.zero_stage >= 2), 0.0, jobs.trained_share * jobs.gradient_bytes),
        np.where(is_offloaded, 0.0, jobs.trained_share * jobs.state_bytes),
    )


def _weight_bytes(jobs: JobTable) -> Column:
    """Return the mean bytes per parameter of a rank's weights.

    ZeRO has frozen ones in the precision of products, if they are not quantized."""
    frozen_bytes = np.where(jobs.zero_stage >= 1, jobs.compute_dtype_bytes, jobs.parameter_bytes)
    frozen_share = 1 - jobs.trained_share - jobs.quantized_share
    quantized_bytes = jobs.quantized_share * (NF4_BLOCK_BYTES / NF4_BLOCK)
    return jobs.trained_share * jobs.parameter_bytes + frozen_share * frozen_bytes + quantized_bytes


def host_bytes(jobs: JobTable) -> Column:
    """Return the bytes of CPU memory per parameter that a rank trains.

    With files, ZeRO-3 stores only the optimizer state in files, and the other stages store everything there.
    """
    gradients = np.where(jobs.zero_stage >= 2, jobs.gradient_bytes, 0.0)
    bytes_with_files = np.where(jobs.zero_stage >= 3, gradients + master_weight_bytes(jobs.compute_dtype_bytes), 0.0)
    return select_choice(jobs.offload, {"cpu": gradients + _trained_state_bytes(jobs), "nvme": bytes_with_files}, 0.0)


def upload_seconds(jobs: JobTable, parameters: Column) -> Column:
    """Return the seconds to copy a rank's share of `parameters` to the device before a ZeRO-3 gather."""
    return np.where(
        (jobs.offload > 0) & (jobs.zero_stage >= 3),
        parameters * _weight_bytes(jobs) / _pinned_bytes_per_second(jobs),
        0.0,
    )


def offload_seconds(constants: TimeConstants, jobs: JobTable, owned: Column) -> Column:
    """Return the seconds of a step in which a rank only copies or updates offloaded parameters.

    Files are read ahead and written behind (`parallel.data.offload`), so the slower of disk and CPU counts. A CPU is
    never assumed to be faster than the device, so offloading what fits never pays. `owned` is the number of offloaded
    parameters that the rank updates.
    """
    host = HOST_MEMORY_EFFICIENCY * jobs.host_bytes_per_second
    pass_bytes = _host_pass_bytes(jobs)
    step_seconds = np.maximum(pass_bytes / host, memory_pass_seconds(constants, jobs, pass_bytes))
    disk_seconds = np.where(jobs.offload == CODES["nvme"], _disk_bytes(jobs) / jobs.disk_bytes_per_second, 0.0)
    seconds_per_parameter = _copy_seconds_per_parameter(jobs) + np.maximum(step_seconds, disk_seconds)
    return np.where(jobs.offload > 0, owned * seconds_per_parameter, 0.0)


def add_input_copies(jobs: JobTable, block: StageTime) -> StageTime:
    """Return `block` with the exposed time of copies of inputs between device and host.

    The forward pass of a block hides the copy of its input to the host. Its backward pass hides the copy of the
    previous block's input back to the device.
    """
    copy_seconds = input_copy_seconds(jobs)
    forward = np.maximum(copy_seconds - block.forward, 0.0)
    backward = np.maximum(copy_seconds - block.backward, 0.0)
    return replace(
        block,
        forward=block.forward + forward,
        backward=block.backward + backward,
        upload=block.upload + forward + backward,
    )


def input_copy_seconds(jobs: JobTable) -> Column:
    """Return the seconds of a copy of a block's input for a micro-batch, in one direction; 0 where it is not offloaded.

    The backward pass waits for the first of these copies, which nothing hides.
    """
    return np.where(offloads_inputs(jobs), block_input_bytes(jobs) / _pinned_bytes_per_second(jobs), 0.0)


def _copy_seconds_per_parameter(jobs: JobTable) -> Column:
    """Return the copy seconds per parameter: gradients to the host, updated rows to the device.

    ZeRO-2 and 3 copy gradients at every micro-batch. The first copy goes to pinned memory, and ZeRO-3 does not wait for
    it.
    """
    pinned = _pinned_bytes_per_second(jobs)
    staged = np.minimum(pinned, MAX_UNPINNED_BYTES_PER_SECOND)
    later_seconds = (jobs.micro_batches - 1) / staged
    seconds_per_gradient_byte = np.select(
        [jobs.zero_stage >= 3, jobs.zero_stage >= 2], [later_seconds, later_seconds + 1 / pinned], 1 / staged
    )
    row_seconds = np.where(jobs.zero_stage >= 3, 0.0, jobs.parameter_bytes / staged)
    return jobs.gradient_bytes * seconds_per_gradient_byte + row_seconds


def _host_pass_bytes(jobs: JobTable) -> Column:
    """Return the bytes of CPU memory read and written per parameter in a step.

    They cover accumulation of gradients, their norm, scaling and casting; the step, which reads and writes rows and
    state and reads gradients (PyTorch's fused optimizer); and the cast of rows for the model.
    """
    gradient_bytes = jobs.gradient_bytes
    row_bytes = master_weight_bytes(jobs.compute_dtype_bytes)
    is_zero3 = jobs.zero_stage >= 3
    accumulated = np.where(jobs.zero_stage >= 2, 3 * gradient_bytes * (jobs.micro_batches - 1), 0.0)
    prepared = np.select(
        [is_zero3, jobs.zero_stage >= 2],
        [3 * gradient_bytes, 4 * gradient_bytes + row_bytes],
        gradient_bytes + row_bytes,
    )
    cast_bytes = np.where(is_zero3, 0.0, row_bytes + jobs.parameter_bytes)
    return accumulated + prepared + 2 * _trained_state_bytes(jobs) + row_bytes + cast_bytes


def _disk_bytes(jobs: JobTable) -> Column:
    """Return the bytes per parameter that a step reads from and writes to files.

    ZeRO-1 and 2: rows and state, and the rows once more for the gather. ZeRO-2 also reads and writes gradients at every
    micro-batch (as measured: docs/results/benchmarks/offload.md). ZeRO-3: the optimizer state.
    """
    gradients = np.where(jobs.zero_stage >= 2, 2 * jobs.gradient_bytes * jobs.micro_batches, 0.0)
    row_bytes = 2 * _trained_state_bytes(jobs) + master_weight_bytes(jobs.compute_dtype_bytes) + gradients
    return np.where(jobs.zero_stage >= 3, 2 * jobs.state_bytes, row_bytes)


def _trained_state_bytes(jobs: JobTable) -> Column:
    """Return the bytes of rows and optimizer state per parameter.

    Without offload the rows are the model's own, unless the model computes in fewer bytes.
    """
    row_bytes = master_weight_bytes(jobs.compute_dtype_bytes)
    has_rows_in_state = (jobs.zero_stage < 3) & (jobs.parameter_bytes < row_bytes)
    return jobs.state_bytes + np.where(has_rows_in_state, 0.0, row_bytes)


def _pinned_bytes_per_second(jobs: JobTable) -> Column:
    return PINNED_COPY_EFFICIENCY * jobs.host_link_bytes_per_second
