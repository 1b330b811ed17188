"""What offload saves a device and costs a step: bytes that rest elsewhere, bytes that move, and the update on a CPU.

As Phalanx's strategies do it. ZeRO-1 and 2 (`parallel.data.zero`) copy gradients down, step their rows in pieces and
copy them up, one after the other: nothing else goes on meanwhile, but for the gather of the piece before. ZeRO-3
(FSDP2's CPUOffloadPolicy) copies a block's parameters up before each gather, ahead of their use, and the first
micro-batch's gradients down beside the backward pass; those of later ones wait to be added. Muon's products, which a
CPU makes slowly, are not in it. The shares and the speed that stand here as constants are usual ones, not measured."""

from __future__ import annotations

import numpy as np

from phalanx.cost.estimate.constants import TimeConstants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.estimate.kernel_time import memory_pass_seconds
from phalanx.cost.kinds import Column, OffloadTarget
from phalanx.cost.precision import master_weight_bytes

PINNED_COPY_EFFICIENCY = 0.8
"""Of PCIe's bandwidth, what copies from and to pinned memory reach: 25 of Gen4's 31.5 GB/s."""
MAX_UNPINNED_BYTES_PER_SECOND = 10e9
"""The most that others reach: the driver copies them by way of pinned memory of its own, with one core. Rows of other
precision than the model's are such: what casts them for a copy makes a tensor that is not pinned."""
HOST_MEMORY_EFFICIENCY = 0.8
"""Of CPU memory's bandwidth, what passes over long tensors reach."""


def device_state_bytes(jobs: JobTable) -> tuple[Column, Column, Column]:
    """Bytes per parameter of parameters, gradients and optimizer state that stay on the device."""
    is_offloaded = jobs.offload > 0
    resident: tuple[Column, Column, Column] = (
        np.where(is_offloaded & (jobs.zero_stage >= 3), 0.0, jobs.parameter_bytes),
        np.where(is_offloaded & (jobs.zero_stage >= 2), 0.0, jobs.gradient_bytes),
        np.where(is_offloaded, 0.0, jobs.state_bytes),
    )
    return resident


def host_bytes(jobs: JobTable) -> Column:
    """Bytes of CPU memory for each parameter of which a rank trains its share. Of ZeRO-3 only optimizer state is in
    files, of the others all."""
    gradients = np.where(jobs.zero_stage >= 2, jobs.gradient_bytes, 0.0)
    bytes_with_files = np.where(jobs.zero_stage >= 3, gradients + master_weight_bytes(jobs.compute_dtype_bytes), 0.0)
    targets = [jobs.offload == OffloadTarget.CPU, jobs.offload == OffloadTarget.FILES]
    bytes_per_parameter: Column = np.select(targets, [gradients + _trained_state_bytes(jobs), bytes_with_files], 0.0)
    return bytes_per_parameter


def upload_seconds(jobs: JobTable, parameters: Column) -> Column:
    """Seconds to bring these parameters, this rank's share, to the device before a gather: ZeRO-3's rest elsewhere."""
    return np.where(
        (jobs.offload > 0) & (jobs.zero_stage >= 3),
        parameters * jobs.parameter_bytes / _pinned_bytes_per_second(jobs),
        0.0,
    )


def offload_seconds(constants: TimeConstants, jobs: JobTable, owned: Column) -> Column:
    """Seconds of a step in which a rank only moves or steps the `owned` parameters that rest elsewhere.

    Files are read ahead and written behind (`parallel.data.offload`): of disk and CPU, the slower one counts. No CPU is
    taken to be faster than the device: to offload what would fit never pays.
    """
    host = HOST_MEMORY_EFFICIENCY * jobs.host_bytes_per_second
    step_seconds = np.maximum(
        _host_pass_bytes(jobs) / host, memory_pass_seconds(constants, jobs, _host_pass_bytes(jobs))
    )
    disk_seconds = np.where(jobs.offload == OffloadTarget.FILES, _disk_bytes(jobs) / jobs.disk_bytes_per_second, 0.0)
    return np.where(
        jobs.offload > 0, owned * (_copy_seconds_per_parameter(jobs) + np.maximum(step_seconds, disk_seconds)), 0.0
    )


def _copy_seconds_per_parameter(jobs: JobTable) -> Column:
    """Per parameter: gradients down, of ZeRO-2 and 3 at every micro-batch (the first into pinned memory, which ZeRO-3
    does not wait for), and what the rows have become up."""
    pinned = _pinned_bytes_per_second(jobs)
    staged = np.minimum(_pinned_bytes_per_second(jobs), MAX_UNPINNED_BYTES_PER_SECOND)
    later_seconds = (jobs.micro_batches - 1) / staged
    seconds_per_gradient_byte = np.select(
        [jobs.zero_stage >= 3, jobs.zero_stage >= 2], [later_seconds, later_seconds + 1 / pinned], 1 / staged
    )
    copies: Column = jobs.gradient_bytes * seconds_per_gradient_byte + np.where(
        jobs.zero_stage >= 3, 0.0, jobs.parameter_bytes / staged
    )
    return copies


def _host_pass_bytes(jobs: JobTable) -> Column:
    """Bytes of CPU memory read and written per parameter in a step: gradients added to those before, their norm, their
    scaling and casting; the step itself, which reads and writes rows and state and reads the gradients (PyTorch's
    fused); and rows cast for the model."""
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
    passes: Column = accumulated + prepared + 2 * _trained_state_bytes(jobs) + row_bytes + cast_bytes
    return passes


def _disk_bytes(jobs: JobTable) -> Column:
    """Bytes read from and written to files per parameter in a step. Of ZeRO-1 and 2 rows and state, and the rows once
    more to be gathered; of ZeRO-2 also gradients, read and written at every micro-batch (as measured:
    docs/benchmarks/offload.md). Of ZeRO-3 the optimizer's state."""
    gradients = np.where(jobs.zero_stage >= 2, 2 * jobs.gradient_bytes * jobs.micro_batches, 0.0)
    row_bytes = 2 * _trained_state_bytes(jobs) + master_weight_bytes(jobs.compute_dtype_bytes) + gradients
    return np.where(jobs.zero_stage >= 3, 2 * jobs.state_bytes, row_bytes)


def _trained_state_bytes(jobs: JobTable) -> Column:
    """Bytes of rows and optimizer state per parameter. Without offload the rows are the model's own, unless that
    computes in fewer bytes."""
    row_bytes = master_weight_bytes(jobs.compute_dtype_bytes)
    has_rows_in_state = (jobs.zero_stage < 3) & (jobs.parameter_bytes < row_bytes)
    return jobs.state_bytes + np.where(has_rows_in_state, 0.0, row_bytes)


def _pinned_bytes_per_second(jobs: JobTable) -> Column:
    return PINNED_COPY_EFFICIENCY * jobs.host_link_bytes_per_second
