"""The rate that a range test suggests, on losses whose best rate is known, and the run of the test."""

from __future__ import annotations

import math

import pytest

from phalanx.plan.advice.learning_rate_range import range_test_run, suggest_learning_rate
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table

STEPS = 100


def descent_losses(curvature: float, rates: list[float]) -> list[float | None]:
    """Return the losses of gradient descent on curvature / 2 x^2, from x = 1. The best rate is 1 / curvature."""
    x = 1.0
    losses: list[float | None] = []
    for rate in rates:
        losses.append(curvature / 2 * x * x)
        x *= 1 - rate * curvature
    return [loss if loss is not None and math.isfinite(loss) else None for loss in losses]


def rising_rates(low: float, high: float) -> list[float]:
    return [low * (high / low) ** (step / (STEPS - 1)) for step in range(STEPS)]


@pytest.mark.parametrize("curvature", [0.3, 10.0, 500.0])
def test_suggestion_is_near_best_rate_of_gradient_descent(curvature: float) -> None:
    rates = rising_rates(1e-5, 100.0)
    tested = suggest_learning_rate(rates, descent_losses(curvature, rates))
    # The loss rises above 2 / curvature. A rate is written with one digit, and is 1.18 times the one before.
    assert tested.lowest == pytest.approx(2 / curvature, rel=0.5)
    assert tested.suggestion == pytest.approx(1 / curvature, rel=0.5)


def test_range_without_a_minimum_has_no_suggestion() -> None:
    rates = rising_rates(1e-5, 1e-2)
    tested = suggest_learning_rate(rates, descent_losses(1.0, rates))
    assert tested.suggestion is None
    assert tested.reason == "the loss still fell at the highest rate: repeat with a higher one than 0.01"
    rates = rising_rates(2.5, 10.0)
    tested = suggest_learning_rate(rates, descent_losses(1.0, rates))
    assert tested.suggestion is None
    assert tested.reason.startswith("the loss rose from the lowest rate on")
    with pytest.raises(UserError, match=r"--low = 2.5 is too high"):
        suggest_learning_rate(rates, [3.0, None, *[1.0] * (STEPS - 2)])


def test_losses_after_a_divergence_are_left_out() -> None:
    rates = rising_rates(1e-5, 100.0)
    losses: list[float | None] = [5.0 - min(step, 60) / 20 for step in range(STEPS)]
    losses[70:] = [math.nan, *[0.0] * 29]
    tested = suggest_learning_rate(rates, losses)
    assert len(tested.losses) == len(tested.rates) == 70
    assert min(tested.losses) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("low", "high", "steps", "problem"),
    [
        (0.1, 0.1, 100, "--low = 0.1 is not below --high, 0.1"),
        (1e-6, 1.0, 19, "--steps = 19 is too short for a curve"),
    ],
)
def test_range_that_is_empty_or_short_is_refused(low: float, high: float, steps: int, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        range_test_run(run_from_table({"model": {"preset": "tiny"}}), low, high, steps)


def test_run_of_range_test_changes_only_length_rate_and_records() -> None:
    run = run_from_table(
        {
            "model": {"preset": "tiny"},
            "training": {"steps": 1000},
            "optimizer": {"name": "muon", "learning_rate": 0.01},
            "evaluation": {"every": 5, "stop_after": 2},
            "metrics": {"wandb": "project"},
            "phase": [{"from_share": 0.8, "lr_schedule": "linear"}],
            "callbacks": {"mine": "mine:Callback"},
        }
    )
    test = range_test_run(run, 1e-4, 1.0, 50)
    assert (test.name, test.training.steps, test.training.seconds) == ("run-lr-range", 50, None)
    assert test.optimizer.muon_learning_rate == pytest.approx(100 * run.optimizer.muon_learning_rate)
    assert test.phase == []
    assert list(test.callbacks) == ["stop_at_divergence"]
    assert (test.evaluation.every, test.metrics.wandb) == (0, None)
    for table in ("model", "data", "layout", "cluster"):
        assert getattr(test, table) == getattr(run, table)
