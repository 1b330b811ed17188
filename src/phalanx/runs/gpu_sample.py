"""Sample of a GPU's sensors during training: a part of the step's record (`StepRecord`)."""

from __future__ import annotations

from typing_extensions import TypedDict

from phalanx.runs.decode import Amount, Count


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
    """Active values of `throttle_reasons.THROTTLE_REASONS`."""
    ecc_corrected: Count
    """Corrected ECC errors since the first sample of this start."""
    ecc_uncorrected: Count
    """Uncorrected ECC errors since the first sample of this start."""
