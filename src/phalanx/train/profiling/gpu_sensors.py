"""Sensors of a rank's GPU, read on the host with NVIDIA's NVML, which does not wait for kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Any, cast

import torch

from phalanx.runs.gpu_sample import GpuSample
from phalanx.runs.throttle_reasons import THROTTLE_REASONS
from phalanx.spec.errors import UserError
from phalanx.spec.extras import missing_package

NOT_RECORDED = "GPU power, clocks and temperature are not recorded"
SAMPLE_SECONDS = 1.0
"""Minimum time between samples: rank records reach their file once a second."""
MAX_TIME_SHARE = 1e-3
"""Maximum share of the host's time spent in samples: slow sensors are read less often."""
NVML_UNITS = {"power_watts": 1000, "energy_joules": 1000, "utilization": 100}
"""Number of NVML's units per unit of a sample: milliwatts, millijoules, percent."""
ECC_COUNTERS = {"ecc_corrected", "ecc_uncorrected"}
Readers = Mapping[str, Callable[[], int]]
"""Readers of the fields of a sample, in NVML's units."""


class GpuSensors:
    """Samples of the sensors, at most one per `SAMPLE_SECONDS`."""

    def __init__(self, readers: Readers, unsupported: type[Exception]) -> None:
        """Read the error counters, which later samples are relative to.

        `unsupported` is the error of a sensor that the GPU does not have."""
        self._readers = readers
        self._unsupported = unsupported
        self._due_at = 0.0
        self._first = self._read_sensors()

    def sample_if_due(self) -> GpuSample | None:
        """Return a sample, or None if the last one is recent or the GPU has no sensors."""
        started_at = time.perf_counter()
        if started_at < self._due_at:
            return None
        sample = convert_reading(self._read_sensors(), self._first)
        self._due_at = started_at + seconds_to_next_sample(time.perf_counter() - started_at)
        return sample or None

    def _read_sensors(self) -> dict[str, int]:
        reading = {}
        for name, read in self._readers.items():
            with suppress(self._unsupported):
                reading[name] = read()
        return reading


def open_gpu_sensors(device: torch.device) -> GpuSensors | None:
    """Return the sensors of this rank's GPU; None on a CPU, and on AMD's GPUs.

    Raises UserError if nvidia-ml-py is not installed, or NVML finds no driver. Training needs neither."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    if find_spec("pynvml") is None:
        raise missing_package(NOT_RECORDED, None, "pynvml")
    try:
        import pynvml
    except ImportError as error:
        raise UserError(
            NOT_RECORDED, None, f"because of an error: {error}", "pip install --upgrade nvidia-ml-py"
        ) from None
    try:
        handle = torch.cuda._get_pynvml_handler(device)  # by CUDA_VISIBLE_DEVICES
        return GpuSensors(_build_nvml_readers(handle), pynvml.NVMLError)
    except (pynvml.NVMLError, RuntimeError, AttributeError, ImportError) as error:
        fix = "install NVIDIA's driver with libnvidia-ml.so.1, and pip install --upgrade nvidia-ml-py"
        raise UserError(NOT_RECORDED, None, f"because NVML failed: {error}", fix) from None


def _build_nvml_readers(handle: object) -> Readers:
    import pynvml as nvml

    def read_utilization() -> int:
        return int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)

    ecc_errors = partial(nvml.nvmlDeviceGetTotalEccErrors, handle, counterType=nvml.NVML_VOLATILE_ECC)
    return {
        "power_watts": partial(nvml.nvmlDeviceGetPowerUsage, handle),
        "energy_joules": partial(nvml.nvmlDeviceGetTotalEnergyConsumption, handle),
        "clock_mhz": partial(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        "temperature_celsius": partial(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        "utilization": read_utilization,
        "throttle_reasons": partial(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle),
        "ecc_corrected": partial(ecc_errors, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        "ecc_uncorrected": partial(ecc_errors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
    }


def seconds_to_next_sample(cost_seconds: float) -> float:
    """Return the seconds until the next sample after one that took `cost_seconds`."""
    return max(SAMPLE_SECONDS, cost_seconds / MAX_TIME_SHARE)


def convert_reading(reading: Mapping[str, int], first: Mapping[str, int]) -> GpuSample:
    """Convert values in NVML's units to a sample; counts of errors are relative to the `first` reading."""
    sample: dict[str, Any] = dict(reading)
    for name in NVML_UNITS.keys() & reading.keys():
        sample[name] = reading[name] / NVML_UNITS[name]
    for name in ECC_COUNTERS & reading.keys():
        sample[name] = reading[name] - first.get(name, reading[name])
    if "throttle_reasons" in reading:
        bits = reading["throttle_reasons"]
        sample["throttle_reasons"] = [reason for bit, reason in THROTTLE_REASONS.items() if bits & bit]
    return cast(GpuSample, sample)
