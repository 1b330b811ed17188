"""Sensors of a GPU: NVML's own error without a driver, and the conversion of its values."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from phalanx.spec.errors import UserError
from phalanx.train.profiling.gpu_sensors import (
    SAMPLE_SECONDS,
    GpuSensors,
    convert_reading,
    open_gpu_sensors,
    seconds_to_next_sample,
)

GPU = torch.device("cuda", 0)
READING = {
    "power_watts": 612_345,
    "energy_joules": 7_200_000_500,
    "clock_mhz": 1755,
    "temperature_celsius": 64,
    "utilization": 97,
    "throttle_reasons": 0x4 | 0x8 | 0x40,
    "ecc_corrected": 12,
    "ecc_uncorrected": 3,
}
"""Values in NVML's units."""


def test_cpu_has_no_sensors() -> None:
    assert open_gpu_sensors(torch.device("cpu")) is None


@pytest.mark.skipif(find_spec("pynvml") is not None, reason="nvidia-ml-py is installed")
def test_missing_library_names_what_installs_it() -> None:
    with pytest.raises(UserError, match=r"not recorded requires pynvml, .*\n  fix: pip install 'phalanx\[gpu\]'"):
        open_gpu_sensors(GPU)


@pytest.mark.skipif(torch.cuda.is_available() or find_spec("pynvml") is None, reason="for NVML without a driver")
def test_missing_driver_is_an_error_that_says_so() -> None:
    with pytest.raises(UserError, match=r"not recorded because NVML failed: .*\n  fix: install NVIDIA's driver"):
        open_gpu_sensors(GPU)


def test_convert_reading_converts_units_names_reasons_and_counts_errors_since_the_first() -> None:
    assert convert_reading(READING, {**READING, "ecc_corrected": 2, "ecc_uncorrected": 3}) == {
        "power_watts": 612.345,
        "energy_joules": 7_200_000.5,
        "clock_mhz": 1755,
        "temperature_celsius": 64,
        "utilization": 0.97,
        "throttle_reasons": ["sw_power_cap", "hw_slowdown", "hw_thermal_slowdown"],
        "ecc_corrected": 10,
        "ecc_uncorrected": 0,
    }


def test_convert_reading_leaves_out_absent_sensors_and_the_bit_of_an_idle_gpu() -> None:
    assert convert_reading({"throttle_reasons": 0x1}, {}) == {"throttle_reasons": []}
    assert convert_reading({"ecc_corrected": 5}, {}) == {"ecc_corrected": 0}


def test_samples_are_a_second_apart_and_take_a_thousandth_of_the_time() -> None:
    assert seconds_to_next_sample(1e-4) == SAMPLE_SECONDS
    assert seconds_to_next_sample(0.02) == pytest.approx(20.0)
    sensors = GpuSensors({"clock_mhz": lambda: 1755}, unsupported=OSError)
    assert sensors.sample_if_due() == {"clock_mhz": 1755}
    assert sensors.sample_if_due() is None


def test_unsupported_sensors_are_skipped() -> None:
    def fail() -> int:
        raise OSError("not supported")

    assert GpuSensors({"clock_mhz": fail, "utilization": lambda: 50}, unsupported=OSError).sample_if_due() == {
        "utilization": 0.5
    }
    assert GpuSensors({"clock_mhz": fail}, unsupported=OSError).sample_if_due() is None
