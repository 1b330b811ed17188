"""The arithmetic of the goodput benchmark, without killing a run."""

from __future__ import annotations

import pytest

from benchmarks.goodput import BEHIND, Failure, Measurements, Observations, page, read_failures, slowed_seconds
from phalanx.cost.formulas.reliability import goodput

EVENTS = [
    {"time": 0.0, "kind": "started", "step": 0},
    {"time": 100.5, "kind": "failed", "step": 58},
    {"time": 105.0, "kind": "failed", "step": 50},
    {"time": 110.0, "kind": "started", "step": 50},
    {"time": 200.25, "kind": "failed", "step": 99},
    {"time": 206.0, "kind": "started", "step": 98},
]
OBSERVED_STEPS = [(1.0, 1), (99.0, 58), (109.5, 50), (111.0, 51), (200.0, 99), (205.0, 98), (208.0, 99), (300.0, 150)]


def test_goodput_benchmark_times_failures_from_kill() -> None:
    """A second kill during recovery is not a separate failure. A kill before the first step after another kill
    leaves the first failure without a resume time, and loses no further steps."""
    observations = Observations(killed=[100.0, 104.0, 104.5, 200.0], seen=OBSERVED_STEPS, ended=300.0)
    assert read_failures(observations, EVENTS) == [Failure(0.5, None, 8), Failure(1.0, 7.0, 0), Failure(0.25, 8.0, 1)]


def test_goodput_benchmark_predicts_goodput_from_measured_times() -> None:
    failures = [Failure(0.5, 9.0, 8), Failure(1.0, None, 0), Failure(0.5, 11.0, 1)]
    measured = Measurements(300.0, 2400, 0.1, 0.11, 5.0, 0.05, 0.1, failures)
    assert measured.goodput == pytest.approx(0.8)
    assert measured.predicted == goodput(
        interval_seconds=5.0, write_seconds=0.15, mtbf_seconds=100.0, restart_seconds=10.0
    )
    text = page(measured, 90)
    assert "| goodput, measured | 80.0% |" in text
    assert "| goodput, measured with the median step | 88.0% |" in text
    assert "3, 1 of them before the first step after the previous failure" in text


def test_goodput_benchmark_measures_slowdown_of_steps_after_checkpoint() -> None:
    """The first step after a checkpoint takes 0.2 s longer. A start that fails soon after a save is not evaluated."""
    save, step, slow = (
        {"pause": "checkpoint"},
        {"seconds": {"passes": 0.09, "reduce": 0.01}},
        {"seconds": {"passes": 0.3}},
    )
    lines = 20 * [slow] + 3 * [save, slow, *(2 * BEHIND * [step])] + [save, slow, slow]
    assert slowed_seconds(lines) == pytest.approx(0.2)
