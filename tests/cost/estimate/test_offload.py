"""The time of offloading, compared with hand-computed and measured numbers."""

import numpy as np
import pytest

from phalanx.cost.estimate import offload
from phalanx.cost.estimate.constants import time_constants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.estimate.step_time import layer_seconds, step_seconds
from phalanx.spec.layout import OffloadName
from tests.helpers.job_tables import make_job_row, make_job_table

TIME_CONSTANTS = time_constants()
SPEEDS = {"host_link_bytes_per_second": 25e9, "host_bytes_per_second": 100e9, "disk_bytes_per_second": 2e9}
BF16 = {"parameter_bytes": 2, "gradient_bytes": 2, "gradient_wire_bytes": 2, "state_bytes": 12}
SHARDED = {"parameter_bytes": 4, "gradient_bytes": 4, "gradient_wire_bytes": 4, "state_bytes": 8}


def make_offload_table(zero: int, kind: OffloadName = "cpu", m: int = 8, **columns: float) -> JobTable:
    return make_job_table(
        make_job_row(
            zero_stage=zero, offload=kind, micro_batches=m, **SPEEDS, **(SHARDED if zero == 3 else BF16), **columns
        )
    )


@pytest.mark.parametrize(
    ("zero", "copies", "passes"),
    [
        # gradients (bf16) down and rows up, neither pinned: 10 GB/s; gradients cast, AdamW's 28 bytes, rows cast
        (1, 2 / 10e9 + 2 / 10e9, (2 + 4) + 28 + (4 + 2)),
        # gradients at every micro-batch, the first pinned: 20 GB/s; added 7 times, norm, scaled, cast
        (2, 2 / 20e9 + 7 * 2 / 10e9 + 2 / 10e9, 7 * 6 + 2 + 4 + (2 + 4) + 28 + (4 + 2)),
        # gradients (fp32) of all micro-batches but the first; added, norm, scaled
        (3, 7 * 4 / 10e9, 7 * 12 + 4 + 8 + 28),
    ],
)
def test_offload_seconds_match_hand_computed_cases(zero, copies, passes):
    seconds = offload.offload_seconds(TIME_CONSTANTS, make_offload_table(zero), np.array([1e9]))
    assert seconds[0] == pytest.approx(1e9 * (copies + passes / 80e9))


def test_offload_seconds_to_files_are_limited_by_disk_bandwidth():
    moved = 2 * 12 + 4
    seconds = offload.offload_seconds(TIME_CONSTANTS, make_offload_table(1, "nvme"), np.array([1e9]))
    assert seconds[0] == pytest.approx(1e9 * (4 / 10e9 + moved / 2e9))
    fast = make_offload_table(1, "nvme")
    fast.disk_bytes_per_second[:] = 1e15
    assert offload.offload_seconds(TIME_CONSTANTS, fast, np.array([1e9])) == offload.offload_seconds(
        TIME_CONSTANTS, make_offload_table(1), np.array([1e9])
    )


def test_disk_offload_traffic_matches_measured_reads_and_writes():
    """Measured in docs/results/benchmarks/offload.md: 463 M parameters, zero2, 8
    micro-batches: 14.9 GB read, 13.0 GB written."""
    assert 463e6 * offload._disk_bytes(make_offload_table(2, "nvme"))[0] == pytest.approx(14.9e9 + 13.0e9, rel=0.01)


def test_zero3_offload_uploads_parameters_before_every_all_gather():
    """A fast link hides the uploads. A slow link uploads an eighth of
    all parameters in each pass of 8 micro-batches."""

    def upload(kind: OffloadName, speed: float) -> float:
        row = make_job_row(
            dp=8,
            shard_group_size=8,
            zero_stage=3,
            offload=kind,
            **{**SPEEDS, **SHARDED, "host_link_bytes_per_second": speed},
        )
        table = make_job_table(row)
        return float((table.layers * table.micro_batches * layer_seconds(TIME_CONSTANTS, table).dense.upload)[0])

    assert upload("none", 1e9) == 0
    assert upload("cpu", 1e15) < 1e-3
    uploads = 8 * 2 * 8.03e9 / 8 * 4 / 0.8e9
    assert 0.8 * uploads < upload("cpu", 1e9) < uploads
    assert offload.upload_seconds(make_offload_table(2), np.array([1e9]))[0] == 0


def test_offload_moves_optimizer_step_from_device_to_host():
    on_device, offloaded = (
        step_seconds(TIME_CONSTANTS, make_job_table(make_job_row(zero_stage=1, shard_group_size=1, offload=kind)))
        for kind in ("none", "cpu")
    )
    assert on_device.offload == 0
    assert offloaded.update < on_device.update
    assert offloaded.update + offloaded.offload > on_device.update


@pytest.mark.parametrize(
    ("zero", "kind", "expected"),
    [
        (1, "none", 0),
        (1, "cpu", 12),
        (2, "cpu", 14),
        (3, "cpu", 16),
        (1, "nvme", 0),
        (2, "nvme", 0),
        (3, "nvme", 8),
    ],
)
def test_host_bytes_match_zero_stage_and_offload_target(zero, kind, expected):
    assert offload.host_bytes(make_offload_table(zero, kind))[0] == expected


@pytest.mark.parametrize(("zero", "expected_bytes"), [(1, (2, 2, 0)), (2, (2, 0, 0)), (3, (0, 0, 0))])
def test_device_state_bytes_match_zero_stage_with_cpu_offload(zero, expected_bytes):
    assert tuple(float(column[0]) for column in offload.device_state_bytes(make_offload_table(zero))) == expected_bytes


@pytest.mark.parametrize(("speed", "is_hidden"), [(25e9, True), (0.25e9, False)])
def test_block_hides_the_copy_of_its_input_on_a_fast_link(speed, is_hidden):
    """GPT-3 175B copies 2 bytes x 2,048 tokens x 12,288 over the link during the passes of a block."""
    full, offloaded = (
        make_job_table(make_job_row(recompute=method, micro_batches=8, host_link_bytes_per_second=speed))
        for method in ("full", "offload")
    )
    copy_seconds = float(offload.input_copy_seconds(offloaded)[0])
    tokens_and_width = float((offloaded.tokens * offloaded.width)[0])
    assert copy_seconds == pytest.approx(2 * tokens_and_width / (0.8 * speed))
    assert offload.input_copy_seconds(full)[0] == 0
    before, after = (layer_seconds(TIME_CONSTANTS, jobs).dense for jobs in (full, offloaded))
    exposed = np.maximum(copy_seconds - before.forward, 0) + np.maximum(copy_seconds - before.backward, 0)
    assert after.upload[0] == pytest.approx(exposed[0])
    assert (after.upload[0] == 0) == is_hidden
    assert after.compute[0] == pytest.approx(before.compute[0])
    steps = [step_seconds(TIME_CONSTANTS, jobs) for jobs in (full, offloaded)]
    assert steps[0].offload[0] == 0
    if is_hidden:  # except for the first input that the backward pass of a micro-batch needs
        assert steps[1].total[0] - steps[0].total[0] == pytest.approx(8 * copy_seconds)
