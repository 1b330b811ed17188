"""Sample of a GPU's sensors during training: a part of the step's record (`StepRecord`)."""

from __future__ import annotations

from typing_extensions import TypedDict

from phalanx.runs.decode import Amount, Count

HARDWARE_SLOWDOWNS = ("hw_thermal_slowdown", "hw_power_brake_slowdown")
"""Reasons for lower clocks that no healthy machine has: heat, and the power supply."""
THROTTLE_REASONS = {
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""Reasons for lower clocks by NVML's bit, with nvidia-smi's names. The bit of an idle GPU is none of them."""
SLOWDOWNS = ("hw_slowdown", "sw_thermal_slowdown", *HARDWARE_SLOWDOWNS)
"""Reasons that indicate a fault. A GPU at its power cap (sw_power_cap) is usual under load."""


class GpuSample(TypedDict, total=False):
    """Values of the sensors after a step. A value that the GPU does not report is absent."""

    power_watts: Amount
    energy_joules: Amount
    """Energy since the driver was loaded: differences of samples count."""
    clock_mhz: Amount
    """Clock of the streaming multiprocessors."""
    temperature_celsius: Amount
    utilization: Amount
    """Share of the time in which a kernel ran, over the driver's last sample period."""
    throttle_reasons: list[str]
    """Active values of `THROTTLE_REASONS`."""
    ecc_corrected: Count
    """Corrected ECC errors since the first sample of this start."""
    ecc_uncorrected: Count
    """Uncorrected ECC errors since the first sample of this start."""
