"""Failure rate of a job, its checkpoint interval, and its goodput."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, inf, sqrt

from phalanx.cost.argument_checks import require_non_negative, require_positive
from phalanx.spec.errors import UserError


@dataclass(frozen=True)
class FailureRecord:
    """Observed failures of one job."""

    failures: int
    devices: int
    hours: float

    @property
    def per_device_hour(self) -> float:
        """Failures of the job per hour and device."""
        return self.failures / (self.devices * self.hours)


LLAMA3 = FailureRecord(failures=419, devices=16_384, hours=54 * 24)
"""Unexpected interruptions of the Llama 3 405B run (arXiv 2407.21783, section 3.3.4, table 5).

47 more interruptions were planned. The record uses the table's counts, not its percentages: 148 faulty GPUs are 35.3 %,
but the table prints 30.1 %.
"""

NODE_STORAGE_BYTES_PER_SECOND = 1e9
"""One node's share of the storage of that run, which sustained 2 TB/s for about 2,000 nodes (section 3.3.1)."""


def mtbf_seconds(failures_per_device_hour: float, devices: int) -> float:
    """Return the mean time between failures of a job that any of its devices can stop.

    Failures are independent, and rates add.
    """
    require_positive(failures_per_device_hour=failures_per_device_hour, devices=devices)
    return 3600 / (failures_per_device_hour * devices)


def observed_mtbf_seconds(expected_seconds: float, failures: int, seconds: float) -> float:
    """Return the mean time between failures of a job, from its expected value and its failures so far.

    The expected value counts until two failures occurred sooner than expected.

    Args:
        expected_seconds: Mean time between failures that the devices suggest.
        failures: Number of observed failures.
        seconds: Observation time; can be zero or less if the clocks of hosts differ.
    """
    require_positive(expected_seconds=expected_seconds)
    return min(expected_seconds, seconds / failures) if failures > 1 and seconds > 0 else expected_seconds


# -- The interval: seconds of work from the end of one write to the start of the next ---------------------------------
# `write_seconds` is the training time that a checkpoint costs: the pause, which is shorter than an asynchronous write,
# plus the slowdown of the steps that run during the write. `restart_seconds` is the time from a failure to the first
# step after it: detection, restart and loading. In formulas they are d and R, the interval is tau, and the mean time
# between failures is M.


def young_interval_seconds(write_seconds: float, mtbf_seconds: float) -> float:
    """Return Young's first-order optimum sqrt(2 d M), for d << M.

    Young, Communications of the ACM 17, 1974: the interval with the minimum lost time.
    """
    require_positive(write_seconds=write_seconds, mtbf_seconds=mtbf_seconds)
    return sqrt(2 * write_seconds * mtbf_seconds)


def daly_interval_seconds(write_seconds: float, mtbf_seconds: float) -> float:
    """Return Daly's higher-order optimum of the interval.

    It is sqrt(2 d M) [1 + 1/3 sqrt(d/2M) + 1/9 (d/2M)] - d, and M for d >= 2M (Daly, Future Generation Computer Systems
    22, 2006): the first terms of the series of `optimal_interval_seconds`.
    """
    require_positive(write_seconds=write_seconds, mtbf_seconds=mtbf_seconds)
    half = write_seconds / (2 * mtbf_seconds)
    if half >= 1:
        return mtbf_seconds
    return sqrt(2 * write_seconds * mtbf_seconds) * (1 + sqrt(half) / 3 + half / 9) - write_seconds


def optimal_interval_seconds(write_seconds: float, mtbf_seconds: float) -> float:
    """Return the interval with the maximum `goodput`, which does not depend on the restart time.

    The expected time per second of work, (e^((tau + d)/M) - 1)/tau, is minimal where u = tau/M solves f(u) = u - (1 -
    e^-(u + d/M)) = 0, that is u = 1 + W(-e^-(1 + d/M)) with Lambert's W. f is increasing and convex, and both Young's
    interval and M are above its root. Newton's method starts at the nearer of the two and descends to the root without
    overshooting.
    """
    require_positive(write_seconds=write_seconds, mtbf_seconds=mtbf_seconds)
    write = write_seconds / mtbf_seconds
    root = min(1.0, sqrt(2 * write))
    previous = inf
    while root < previous:
        previous = root
        slope = -expm1(-(root + write))
        root = previous - (previous - slope) / slope
    return previous * mtbf_seconds


def goodput(interval_seconds: float, write_seconds: float, mtbf_seconds: float, restart_seconds: float) -> float:
    """Return the fraction of wall-clock time spent on work that is never lost.

    The formula is (tau/M) / (e^(R/M) (e^((tau + d)/M) - 1)). Failures can occur at any time, including writes and
    restarts (Daly, Future Generation Computer Systems 22, 2006, the higher-order model).

    Args:
        interval_seconds: tau, work between two writes.
        write_seconds: d, training time that a checkpoint costs.
        mtbf_seconds: M, mean time between failures.
        restart_seconds: R, time from a failure to the first step after it.
    """
    require_positive(interval_seconds=interval_seconds, mtbf_seconds=mtbf_seconds)
    require_non_negative(write_seconds=write_seconds, restart_seconds=restart_seconds)
    cycle = (interval_seconds + write_seconds) / mtbf_seconds
    survival = exp(-(restart_seconds / mtbf_seconds) - cycle)
    return interval_seconds / mtbf_seconds * survival / -expm1(-cycle)


@dataclass(frozen=True)
class Reliability:
    """Effect of failures on a job that writes its checkpoints at the optimal interval."""

    mtbf_seconds: float
    interval_seconds: float
    """Seconds of work between two writes."""
    goodput: float
    """Fraction of wall-clock time spent on work that is never lost."""


def reliability(
    failures_per_device_hour: float, devices: int, write_seconds: float, restart_seconds: float
) -> Reliability:
    """Return a job's failure rate, its optimal checkpoint interval, and its goodput at that interval.

    Args:
        failures_per_device_hour: Failure rate of one device.
        devices: Number of devices.
        write_seconds: Training time that a checkpoint costs.
        restart_seconds: Time from a failure to the first step after it.
    """
    mtbf = mtbf_seconds(failures_per_device_hour, devices)
    interval = optimal_interval_seconds(write_seconds, mtbf)
    return Reliability(mtbf, interval, goodput(interval, write_seconds, mtbf, restart_seconds=restart_seconds))


def days_to(tokens: float, tokens_per_second: float, goodput: float = 1.0) -> float:
    """Return the days in which a run trains on `tokens`.

    Args:
        tokens: Tokens to train on.
        tokens_per_second: Speed of the whole run while it trains.
        goodput: Fraction of wall-clock time in which it trains.
    """
    require_positive(tokens_per_second=tokens_per_second, goodput=goodput)
    require_non_negative(tokens=tokens)
    if goodput > 1:
        raise UserError("goodput", goodput, "is not a fraction of the time", fix="use at most 1")
    return tokens / (tokens_per_second * goodput) / 86_400
