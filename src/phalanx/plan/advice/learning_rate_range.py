"""Learning-rate range test: a short training whose rate rises exponentially, and the rate that its losses suggest.

Source: L. N. Smith, Cyclical learning rates for training neural networks (arXiv 1506.01186), section 3.3: train with a
rising rate, and note where the loss stops to fall. The best rate is usually within a factor of two of the largest one
that converges, so the suggestion is half of the rate with the lowest loss. The exponential rise shows rates of
different magnitudes in one run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.spec.base import require
from phalanx.spec.run import CheckpointSpec, EvaluationSpec, MetricsSpec, RunSpec

RISING_RATE = "phalanx.plan.advice.learning_rate_range:rising_rate"
STOP_AT_DIVERGENCE = "phalanx.train.callbacks.learning_rate_range:StopAtDivergence"
MIN_STEPS = 20
WINDOW_SHARE = 0.1
"""Share of the steps over which the loss is averaged."""


@dataclass(frozen=True, kw_only=True)
class LearningRateRange:
    """The losses of a range test, and the rate that they suggest."""

    rates: list[float]
    losses: list[float]
    """Mean losses around each step."""
    lowest: float
    """The rate with the lowest of them."""
    suggestion: float | None
    """The suggested peak of the rate; None if the loss has no minimum between the lowest and the highest rate."""
    reason: str
    """How the suggestion follows, or why there is none."""


def rising_rate(step: int, steps: int, lowest_share: float) -> float:
    """Return a rate that rises exponentially, from `lowest_share` of the peak in step 0 to the peak in the last one."""
    return float(lowest_share ** (1 - step / max(1, steps - 1)))


def range_test_run(run: RunSpec, low: float, high: float, steps: int) -> RunSpec:
    """Return the run of a range test: some steps of a run, in which its rate rises from `low` to `high`.

    It has no warm-up, evaluations, or callbacks of the user. Muon's rate rises in proportion. Raises UserError if the
    range is empty or too short."""
    require(low < high, "--low", low, f"is not below --high, {high:g}", "lower it, or increase --high")
    require(steps >= MIN_STEPS, "--steps", steps, "is too short for a curve", f"use at least {MIN_STEPS}")
    require(run.swarm is None, "swarm", None, "is not supported in a range test", "remove the table [swarm]")
    optimizer = run.optimizer
    return run.replace(
        name=f"{run.name}-lr-range",
        training=run.training.replace(steps=steps, seconds=None, epochs=None),
        optimizer=optimizer.replace(
            learning_rate=high,
            muon_learning_rate=optimizer.muon_learning_rate * high / optimizer.learning_rate,
            lr_function={"class": RISING_RATE, "lowest_share": low / high},
            warmup_steps=0,
        ),
        evaluation=EvaluationSpec(tokens=run.training.seq_len),
        checkpoint=CheckpointSpec(every=0),
        recovery=run.recovery.replace(max_restarts=0, max_rollbacks=0),
        metrics=MetricsSpec(),
        phase=[],
        callbacks={"stop_at_divergence": {"class": STOP_AT_DIVERGENCE}},
    )


def suggest_learning_rate(rates: Sequence[float], losses: Sequence[float | None]) -> LearningRateRange:
    """Return the averaged losses of the steps of a range test, and the rate that they suggest.

    Steps from the first loss on that was not finite (None) are left out, and `rates` rise."""
    finite: list[float] = []
    for loss in losses:
        if loss is None or not math.isfinite(loss):
            break
        finite.append(loss)
    require(len(finite) >= MIN_STEPS // 2, "--low", rates[0], "is too high: the loss diverged at once", "lower it")
    half_window = max(1, round(len(rates) * WINDOW_SHARE / 2))
    averaged = [_mean(finite[max(0, i - half_window) : i + half_window + 1]) for i in range(len(finite))]
    best = min(range(len(averaged)), key=averaged.__getitem__)
    lowest = rates[best]
    suggestion = None
    if best < half_window:
        reason = f"the loss rose from the lowest rate on: repeat with a lower one than {rates[0]:.1g}"
    elif best >= len(finite) - half_window and len(finite) == len(losses):
        reason = f"the loss still fell at the highest rate: repeat with a higher one than {rates[-1]:.1g}"
    else:
        suggestion = float(f"{lowest / 2:.1g}")
        reason = f"half of the rate with the lowest loss, {lowest:.2g} (arXiv 1506.01186, section 3.3)"
    return LearningRateRange(
        rates=list(rates[: len(finite)]), losses=averaged, lowest=lowest, suggestion=suggestion, reason=reason
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
