"""Constants of step times that measured steps make likely: the mode of a posterior.

The logarithm of each constant has a normal prior around its starting value. The logarithm of each step time, and of
each separately measured part, is normal around its prediction. Constants without evidence stay at their starting value.
The width of the posterior relative to the prior shows which constants the runs determine (Laplace's approximation).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.estimate.constants import TimeConstants, bounds
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.estimate.step_time import step_seconds
from phalanx.plan.calibrate.microbenchmarks import OperationTimings

PRIOR_STD = 1.0
"""Standard deviation of a constant's logarithm if only runs on other machines are known."""
NOISE = 0.04
"""Standard deviation of the logarithm of a step time around its prediction."""
COMPUTING_NOISE = 0.1
WAITING_NOISE = 0.5
"""The same for the computing and the waiting time of a step.

Each of the two is the remainder of several effects, and waiting also depends on chance.
"""
MAX_ITERATIONS = 60
MAX_SHARE_BOUND = 1.1
"""Upper bound below which a constant is a fraction of something; its bounds then apply to any machine."""
Array = NDArray[np.float64]
CONSTANTS = tuple(field.name for field in fields(TimeConstants))


@dataclass(frozen=True)
class MeasuredTargets:
    """Measured seconds per step [run]; NaN for parts that were not measured."""

    step_total: Array
    computing_seconds: Array
    """In the slowest rank's passes, without waits."""
    waiting_seconds: Array
    """For collectives, of the rank that waits least."""
    operations: tuple[OperationTimings, ...] = ()
    """Operations that were timed outside of steps."""

    def take(self, runs: Array) -> MeasuredTargets:
        """Return the targets of some runs, without the operations of the other runs."""
        remaining = set(np.arange(len(self))[runs].tolist())
        operations = tuple(timing for timing in self.operations if timing.run is None or timing.run in remaining)
        parts = {"computing_seconds": self.computing_seconds[runs], "waiting_seconds": self.waiting_seconds[runs]}
        return replace(self, step_total=self.step_total[runs], operations=operations, **parts)

    def __len__(self) -> int:
        return len(self.step_total)


@dataclass(frozen=True)
class Prior:
    """Prior of the constants.

    `z` is their distance from `start`, in standard deviations of their logarithms.
    """

    start: TimeConstants

    def constants(self, z: Array) -> TimeConstants:
        """Return the constants at distance `z` from the start; those that hardly moved are unchanged."""
        moved = {
            name: float(f"{getattr(self.start, name) * np.exp(PRIOR_STD * value):.4g}")
            for name, value in zip(CONSTANTS, z, strict=True)
            if abs(value) > 1e-3
        }
        return replace(self.start, **moved)

    @property
    def limit(self) -> Array:
        """Maximum of each z."""
        # Fractions keep their bounds on any machine; latencies and numbers of passes have none.
        upper_bounds = np.array([bounds(field)[1] for field in fields(TimeConstants)])
        is_latency = np.array([name.endswith("_seconds") for name in CONSTANTS])
        max_values = np.where((upper_bounds <= MAX_SHARE_BOUND) & ~is_latency, upper_bounds, np.inf)
        start_values = np.array([getattr(self.start, name) for name in CONSTANTS])
        return np.asarray(np.maximum(np.log(max_values / start_values), 0.0) / PRIOR_STD)

    def residuals(self, jobs: JobTable, targets: MeasuredTargets, z: Array) -> Array:
        """Return the errors of step times, their parts and operations, in standard deviations of logarithms.

        The shape is [..., 3 x run + operation] for z [..., constant], all in one pass of numpy. Errors are 0 for
        unmeasured values.
        """
        count = len(targets)
        points = np.atleast_2d(z)
        repeated_jobs = jobs.select(np.tile(np.arange(count), len(points)))
        predicted_time = step_seconds(self._constants_per_prediction(points, count), repeated_jobs)

        def log_ratio(predicted: Array, measured: Array) -> Array:
            """Return the difference of the logarithms; 0 if either is unknown, or the prediction is zero."""
            predicted = np.broadcast_to(predicted, count * len(points)).reshape(len(points), count)
            is_comparable = (predicted > 0) & ~np.isnan(measured)
            return np.log(np.where(is_comparable, predicted, 1.0) / np.where(is_comparable, measured, 1.0))

        errors = [
            log_ratio(seconds, measured) / noise
            for seconds, measured, noise in (
                (predicted_time.total, targets.step_total, NOISE),
                (predicted_time.compute, targets.computing_seconds, COMPUTING_NOISE),
                (predicted_time.exchange + predicted_time.data_parallel, targets.waiting_seconds, WAITING_NOISE),
            )
        ]
        errors += [
            timing.errors(self._constants_per_prediction(points, len(timing.seconds)), len(points))
            for timing in targets.operations
        ]
        return np.concatenate(errors, axis=1).reshape(*z.shape[:-1], -1)

    def _constants_per_prediction(self, points: Array, count: int) -> TimeConstants:
        """Return the constants of all points, each for `count` predictions: columns of [point x prediction]."""
        log_start = np.log([getattr(self.start, name) for name in CONSTANTS])
        columns: Any = np.exp(np.repeat(log_start + PRIOR_STD * points, count, axis=0)).T
        return TimeConstants(**dict(zip(CONSTANTS, columns, strict=True)))

    def jacobian(self, jobs: JobTable, targets: MeasuredTargets, z: Array, step: float = 1e-4) -> Array:
        """Return the derivative of errors with respect to the constants, [error, constant]."""
        moved_errors = self.residuals(jobs, targets, z + step * np.eye(len(z)))
        return ((moved_errors - self.residuals(jobs, targets, z)) / step).T


def map_estimate(prior: Prior, jobs: JobTable, targets: MeasuredTargets, z: Array | None = None) -> Array:
    """Return the most likely z, by the Levenberg-Marquardt method.

    It starts at `z`, or at the prior.
    """
    z = np.zeros(len(CONSTANTS)) if z is None else z
    limit = prior.limit
    damping = 1e-2
    errors = prior.residuals(jobs, targets, z)
    jacobian = prior.jacobian(jobs, targets, z)
    for _ in range(MAX_ITERATIONS):
        precision = _posterior_precision(jacobian)
        gradient = jacobian.T @ errors + z
        # Constants at their limit stay there unless the gradient leads back inside.
        free_indices = np.flatnonzero((z < limit) | (gradient > 0))
        damped = (precision + damping * np.diag(np.diag(precision)))[np.ix_(free_indices, free_indices)]
        trial = z.copy()
        trial[free_indices] = np.minimum(
            z[free_indices] - np.linalg.solve(damped, gradient[free_indices]), limit[free_indices]
        )
        trial_errors = prior.residuals(jobs, targets, trial)
        gain = _negative_log_posterior(errors, z) - _negative_log_posterior(trial_errors, trial)
        if not gain > 0:
            damping *= 5
            if damping > 1e6:
                break
            continue
        z = trial
        errors = trial_errors
        damping /= 5
        if gain < 1e-4:
            break
        jacobian = prior.jacobian(jobs, targets, z)
    return z


def identified_constants(prior: Prior, jobs: JobTable, targets: MeasuredTargets, z: Array) -> list[str]:
    """Return the constants whose posterior is at most half as wide as their prior.

    `z` is the mode of the posterior.
    """
    widths = np.sqrt(np.diag(np.linalg.inv(_posterior_precision(prior.jacobian(jobs, targets, z)))))
    return [name for name, width in zip(CONSTANTS, widths, strict=True) if width < 0.5]


def leave_one_out_errors(prior: Prior, jobs: JobTable, targets: MeasuredTargets, z: Array) -> Array:
    """Return the error of the logarithm of each step time, as the other runs predict it.

    `z` is the mode of the posterior of all runs.
    """
    errors = np.zeros(len(targets))
    for index in range(len(targets)):
        training_rows = np.arange(len(targets)) != index
        held_out_row = np.array([index])
        estimate = map_estimate(prior, jobs.select(training_rows), targets.take(training_rows), z)
        errors[index] = NOISE * prior.residuals(jobs.select(held_out_row), targets.take(held_out_row), estimate)[0]
    return errors


def _posterior_precision(jacobian: Array) -> Array:
    """Return the inverse of the posterior's covariance."""
    return np.asarray(jacobian.T @ jacobian + np.eye(jacobian.shape[1]))


def _negative_log_posterior(errors: Array, z: Array) -> float:
    return float(np.sum(errors**2) + np.sum(z**2))
