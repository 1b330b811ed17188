"""Checkpoint intervals, compared with published numbers, a search, and simulated failures."""

from dataclasses import asdict
from math import exp, inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost.formulas.reliability import (
    LLAMA3,
    Reliability,
    daly_interval_seconds,
    days_to,
    goodput,
    mtbf_seconds,
    observed_mtbf_seconds,
    optimal_interval_seconds,
    reliability,
    young_interval_seconds,
)
from phalanx.spec.errors import UserError

HOUR = 3600.0
LLAMA3_MTBF_SECONDS = mtbf_seconds(LLAMA3.per_device_hour, LLAMA3.devices)
MTBF = st.floats(1.0, 1e8)
MTBF_FRACTIONS = st.floats(1e-9, 3.0)
"""Fractions of the mean time between failures."""


def test_mtbf_seconds_of_llama3_is_about_three_hours():
    assert mtbf_seconds(LLAMA3.per_device_hour, 16_384) / HOUR == pytest.approx(3.0931, abs=5e-5)
    assert 1 / LLAMA3.per_device_hour == pytest.approx(50_677, abs=0.5)
    assert 1 / LLAMA3.per_device_hour / (24 * 365.25) == pytest.approx(5.78, abs=0.005)
    assert LLAMA3.per_device_hour * 8 * 24 * 1000 == pytest.approx(3.79, abs=0.005)


def test_observed_mtbf_replaces_expected_after_two_early_failures():
    assert [observed_mtbf_seconds(100, failures, 60) for failures in (0, 1, 2)] == [100, 100, 30]
    assert observed_mtbf_seconds(100, 2, 600) == 100
    assert observed_mtbf_seconds(100, 2, -0.5) == 100  # clocks may differ


def test_mtbf_seconds_match_published_failure_rate_per_node_day():
    assert mtbf_seconds(6.5 / 1000 / 24 / 8, 16_384) / HOUR == pytest.approx(1.80, abs=0.005)


@pytest.mark.parametrize(
    ("write", "young", "daly", "expected_goodput"),
    [(10, 471.9, 465.3, 0.9080), (60, 1155.9, 1116.3, 0.8526), (300, 2584.8, 2388.6, 0.7443)],
)
def test_checkpoint_intervals_and_goodput_match_llama3_figures(write, young, daly, expected_goodput):
    assert young_interval_seconds(write, LLAMA3_MTBF_SECONDS) == pytest.approx(young, abs=0.05)
    assert daly_interval_seconds(write, LLAMA3_MTBF_SECONDS) == pytest.approx(daly, abs=0.05)
    assert optimal_interval_seconds(write, LLAMA3_MTBF_SECONDS) == pytest.approx(daly, abs=0.05 if write == 10 else 0.2)
    assert goodput(daly, write, LLAMA3_MTBF_SECONDS, 600) == pytest.approx(expected_goodput, abs=5e-5)
    result = reliability(LLAMA3.per_device_hour, LLAMA3.devices, write, 600)
    assert result == Reliability(
        LLAMA3_MTBF_SECONDS,
        optimal_interval_seconds(write, LLAMA3_MTBF_SECONDS),
        pytest.approx(expected_goodput, abs=5e-5),
    )


def test_checkpoint_intervals_match_other_published_values():
    assert young_interval_seconds(120, 6 * HOUR) / 60 == pytest.approx(37.9, abs=0.05)
    assert young_interval_seconds(10, 6000 + 600) / 15 == pytest.approx(24.22, abs=0.005)  # repairs counted as uptime


def test_goodput_without_failures_loses_write_time_only():
    assert 1 - goodput(3 * HOUR, 40, 1e12, 600) == pytest.approx(0.0037, abs=5e-5)  # BLOOM
    assert goodput(3 * HOUR, 0, 1e12, 600) == pytest.approx(1, abs=1e-7)


@given(MTBF, MTBF_FRACTIONS, MTBF_FRACTIONS, MTBF_FRACTIONS)
def test_optimal_interval_maximizes_goodput(mtbf, write, restart, other):
    write, restart, other = write * mtbf, restart * mtbf, other * mtbf
    best = goodput(optimal_interval_seconds(write, mtbf), write, mtbf, restart)
    others = [
        other,
        young_interval_seconds(write, mtbf),
        daly_interval_seconds(write, mtbf),
        0.999 * optimal_interval_seconds(write, mtbf),
        1.001 * optimal_interval_seconds(write, mtbf),
    ]
    assert 0 < best < 1
    assert all(goodput(interval, write, mtbf, restart) <= best * (1 + 1e-12) for interval in others)


@given(MTBF, MTBF_FRACTIONS)
def test_optimal_interval_solves_its_equation_below_young_and_mtbf(mtbf, write):
    """The equation is u = 1 - e^-(u + d/M), solved by bisection."""
    best = optimal_interval_seconds(write * mtbf, mtbf)
    assert 0 < best <= min(young_interval_seconds(write * mtbf, mtbf), mtbf)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if middle - 1 + exp(-(middle + write)) > 0 else (middle, high)
    assert best / mtbf == pytest.approx(low, rel=1e-6, abs=1e-10)


@given(MTBF, st.floats(1e-9, 1.999))
def test_daly_interval_approximates_optimal_interval(mtbf, half):
    write = half * mtbf
    near = 0.002 if half < 0.1 else 0.07
    assert daly_interval_seconds(write, mtbf) == pytest.approx(optimal_interval_seconds(write, mtbf), rel=near)


def test_daly_interval_equals_mtbf_when_write_is_at_least_twice_mtbf():
    assert daly_interval_seconds(200, 100) == daly_interval_seconds(900, 100) == 100
    assert daly_interval_seconds(199.999, 100) == pytest.approx(200 * (1 + 1 / 3 + 1 / 9) - 200, rel=1e-3)


@pytest.mark.parametrize(
    ("interval", "write", "mtbf", "restart"), [(50, 5, 300, 20), (30, 30, 60, 30), (100, 1, 80, 5)]
)
def test_goodput_matches_simulated_failures(interval, write, mtbf, restart):
    """An interval with its write repeats until no failure occurs in it, and so does a restart."""
    random, cycles, elapsed = Random(1), 10_000, 0.0

    def until_done(seconds):
        failure = random.expovariate(1 / mtbf)
        while failure < seconds:
            yield failure
            failure = random.expovariate(1 / mtbf)
        yield seconds

    for _ in range(cycles):
        attempts = list(until_done(interval + write))
        elapsed += sum(attempts) + sum(sum(until_done(restart)) for _ in attempts[:-1])
    assert cycles * interval / elapsed == pytest.approx(goodput(interval, write, mtbf, restart), rel=0.03)


@given(st.floats(1e-9, 1e-3), st.integers(1, 10**6), st.floats(0.01, 100), st.floats(0, 100))
def test_reliability_decreases_with_more_devices(rate, devices, write, restart):
    fewer, more = (asdict(reliability(rate, count, write, restart)) for count in (devices, 2 * devices))
    assert more["mtbf_seconds"] == pytest.approx(fewer["mtbf_seconds"] / 2)
    assert more["interval_seconds"] < fewer["interval_seconds"]
    assert more["goodput"] < fewer["goodput"] < 1


def test_days_to_scales_with_throughput_and_goodput():
    assert days_to(86_400 * 1000, 1000) == 1
    assert days_to(86_400 * 1000, 1000, 0.8) == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: mtbf_seconds(0, 8), "failures_per_device_hour"),
        (lambda: mtbf_seconds(1e-5, 0), "devices"),
        (lambda: young_interval_seconds(0, 1), "write_seconds"),
        (lambda: daly_interval_seconds(1, inf), "mtbf_seconds"),
        (lambda: optimal_interval_seconds(-1, 1), "write_seconds"),
        (lambda: goodput(0, 1, 1, 1), "interval_seconds"),
        (lambda: goodput(1, 1, 1, float("nan")), "restart_seconds"),
        (lambda: days_to(1, 1, 1.5), "goodput"),
        (lambda: days_to(1, 0), "tokens_per_second"),
    ],
)
def test_reliability_functions_reject_invalid_arguments(call, field):
    with pytest.raises(UserError, match=f"^{field} = "):
        call()
