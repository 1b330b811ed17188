"""How often a job fails, how often it should write a checkpoint, and what part of its time is then useful."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, inf, sqrt

from phalanx.cost.argument_checks import require_non_negative, require_positive
from phalanx.spec.errors import UserError


@dataclass(frozen=True)
class FailureRecord:
    """What broke while one job ran."""

    failures: int
    devices: int
    hours: float

    @property
    def per_device_hour(self) -> float:
        """Failures of the job per hour and device."""
        return self.failures / (self.devices * self.hours)


LLAMA3 = FailureRecord(failures=419, devices=16_384, hours=54 * 24)
"""Unexpected interruptions of the 405B run; 47 more were planned (Llama 3, arXiv 2407.21783, section 3.3.4, table 5).
The table's counts are used, not its percentages: 148 faulty GPUs are 35.3 %, where 30.1 % is printed."""


def mtbf_seconds(failures_per_device_hour: float, devices: int) -> float:
    """Mean time between failures of a job that any one of its devices stops: failures are independent and rates add."""
    require_positive(failures_per_device_hour=failures_per_device_hour, devices=devices)
    return 3600 / (failures_per_device_hour * devices)


def observed_mtbf_seconds(expected_seconds: float, failures: int, seconds: float) -> float:
    """Mean time between failures of a job that failed so often in so many seconds: what was expected of its devices,
    until two failures came sooner than that. (No time at all may have passed by clocks of hosts that differ.)"""
    require_positive(expected_seconds=expected_seconds)
    return min(expected_seconds, seconds / failures) if failures > 1 and seconds > 0 else expected_seconds


# -- the interval: seconds of work from the end of one write to the start of the next ---------------------------------
# `write_seconds` is what a checkpoint costs training: how long that stands still, which is less than the write if it
# goes on behind it, and by how much the steps behind which it does are slower; `restart_seconds` is from a failure to
# the first step again: detection, new start and loading. In formulas they are d and R, the interval tau, and the mean
# time between failures M.


def young_interval_seconds(write_seconds: float, mtbf_seconds: float) -> float:
    """First-order optimum sqrt(2 d M) (Young, Communications of the ACM 17, 1974): the least time lost, if d << M."""
    require_positive(write_seconds=write_seconds, mtbf_seconds=mtbf_seconds)
    return sqrt(2 * write_seconds * mtbf_seconds)


def daly_interval_seconds(write_seconds: float, mtbf_seconds: float) -> float:
    """Higher-order optimum sqrt(2 d M) [1 + 1/3 sqrt(d/2M) + 1/9 (d/2M)] - d, and M from d = 2M on.

    Daly, Future Generation Computer Systems 22, 2006: the first terms of the series of `optimal_interval_seconds`.
    """
    require_positive(write_seconds=write_seconds, mtbf_seconds=mtbf_seconds)
    half = write_seconds / (2 * mtbf_seconds)
    if half >= 1:
        return mtbf_seconds
    return sqrt(2 * write_seconds * mtbf_seconds) * (1 + sqrt(half) / 3 + half / 9) - write_seconds


def optimal_interval_seconds(write_seconds: float, mtbf_seconds: float) -> float:
    """The interval of the best `goodput`, whatever the restart takes.

    The expected time per second of work, (e^((tau + d)/M) - 1)/tau, is least where u = tau/M has
    f(u) = u - (1 - e^-(u + d/M)) = 0, that is u = 1 + W(-e^-(1 + d/M)) with Lambert's W. f rises and is convex, and
    both Young's interval and M are above its root: from the nearer one, Newton's method comes down to the root and
    never passes it.
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
    """The part of wall-clock time that ends up in the model: work that is neither lost, nor writing, nor restarting.

    (tau/M) / (e^(R/M) (e^((tau + d)/M) - 1)), with failures at any time, so while writing and restarting too (Daly,
    Future Generation Computer Systems 22, 2006, the higher-order model).
    """
    require_positive(interval_seconds=interval_seconds, mtbf_seconds=mtbf_seconds)
    require_non_negative(write_seconds=write_seconds, restart_seconds=restart_seconds)
    cycle = (interval_seconds + write_seconds) / mtbf_seconds
    survival = exp(-(restart_seconds / mtbf_seconds) - cycle)
    return interval_seconds / mtbf_seconds * survival / -expm1(-cycle)


@dataclass(frozen=True)
class Reliability:
    """What failures do to a job that writes its checkpoints at the best interval."""

    mtbf_seconds: float
    interval_seconds: float
    """Of work between two writes."""
    goodput: float
    """The part of wall-clock time that ends up in the model."""


def reliability(
    failures_per_device_hour: float, devices: int, write_seconds: float, restart_seconds: float
) -> Reliability:
    """How often the job fails, its best checkpoint interval, and its goodput with that."""
    mtbf = mtbf_seconds(failures_per_device_hour, devices)
    interval = optimal_interval_seconds(write_seconds, mtbf)
    return Reliability(mtbf, interval, goodput(interval, write_seconds, mtbf, restart_seconds=restart_seconds))


def days_to(tokens: float, tokens_per_second: float, goodput: float = 1.0) -> float:
    """Days until `tokens` are trained on, at the whole run's speed while it trains."""
    require_positive(tokens_per_second=tokens_per_second, goodput=goodput)
    require_non_negative(tokens=tokens)
    if goodput > 1:
        raise UserError("goodput", goodput, "is a part of the time", fix="give at most 1")
    return tokens / (tokens_per_second * goodput) / 86_400
