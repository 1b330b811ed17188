"""Fit the planner's constants to published runs, within their bounds.

Writes src/phalanx/cost/estimate/constants.toml.

    python -m benchmarks.fit_planner

Step times and memory are fitted by least squares of logarithms. Every source has at most the weight of a dozen rows, so
that 1,440 runs of one paper do not dominate the fit. Out-of-memory labels are fitted by likelihood.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.stats import norm

from benchmarks.published import ROWS, PublishedRun, read_published_runs, step_time_rows
from phalanx.cost.estimate import constants
from phalanx.cost.estimate.constants import IntervalConstants, MemoryConstants, TimeConstants, bounds
from phalanx.cost.estimate.job_table import JobTable, job_table
from phalanx.cost.estimate.memory import estimate_memory, reserved_bytes
from phalanx.cost.estimate.prediction_interval import KINDS, run_kind
from phalanx.cost.estimate.step_time import step_seconds
from phalanx.plan.tables.predict import best_choice_per_job
from phalanx.spec.formatting import GIB

FITTED = Path(__file__).parents[1] / "src" / "phalanx" / "cost" / "estimate" / "constants.toml"
A_SOURCE_COUNTS = 12
"""Maximum weight of a source, in rows."""
LOW_PRECISION_COUNTS = 0.3
"""Weight relative to rows in 16-bit precision, which alone have accuracy targets."""
Array = NDArray[np.float64]
Constants = TypeVar("Constants", TimeConstants, MemoryConstants)


def fit_time(runs: list[PublishedRun], start: TimeConstants, evaluations: int = 60) -> TimeConstants:
    """Fit the constants of step times to rows with a step time."""
    names, low, high = _bounded(TimeConstants)
    middle = (low + high) / 2
    for _ in range(2):
        jobs = chosen_jobs(runs, start, constants.memory_constants())
        truth = np.array([row.step_seconds for row in runs])
        weights = _weights(runs)

        def residuals(x: Array, jobs: JobTable = jobs, truth: Array = truth, weights: Array = weights) -> Array:
            error = np.log(step_seconds(_constants(TimeConstants, x), jobs).total / truth) * weights
            return np.concatenate([error, 0.1 * (x - middle) / (high - low)])

        x = np.clip(np.log([getattr(start, name) for name in names]), low + 1e-6, high - 1e-6)
        solution = least_squares(residuals, x, loss="soft_l1", f_scale=0.05, max_nfev=evaluations, bounds=(low, high))
        start = _constants(TimeConstants, solution.x)
    return start


def fit_memory(runs: list[PublishedRun], start: MemoryConstants) -> MemoryConstants:
    """Fit the constants of memory to rows with published memory or an out-of-memory label."""
    names, low, high = _bounded(MemoryConstants)
    jobs = job_table([row.job.choices[0] for row in runs])
    out_of_memory = np.array([row.out_of_memory for row in runs])
    labeled = out_of_memory | np.array([row.ran_in_sweep_with_failures for row in runs])
    measured = np.array([row.memory_gib is not None for row in runs])
    truth = np.array([row.memory_gib or 1.0 for row in runs]) * GIB
    weights = _weights([row for row, is_measured in zip(runs, measured, strict=True) if is_measured])

    def residuals(x: Array) -> Array:
        c = _constants(MemoryConstants, x)
        estimate = estimate_memory(c, jobs)
        error = np.log(estimate.allocated_bytes / truth)[measured] * weights
        excess = np.log(reserved_bytes(c, estimate) / jobs.memory_bytes)[labeled] / c.spread
        unlikely = -norm.logcdf(np.where(out_of_memory[labeled], excess, -excess))
        return np.concatenate([2 * error, 0.25 * np.sqrt(np.minimum(unlikely, 8)), 0.1 * (x - middle) / (high - low)])

    middle = (low + high) / 2
    x = np.clip(np.log([getattr(start, name) for name in names]), low + 1e-6, high - 1e-6)
    solution = least_squares(residuals, x, loss="soft_l1", f_scale=0.1, max_nfev=80, bounds=(low, high))
    return _constants(MemoryConstants, solution.x)


def fit_intervals(runs: list[PublishedRun], time: TimeConstants, memory: MemoryConstants) -> IntervalConstants:
    """Fit the half-widths that contain 80 % of each kind of run."""
    jobs = chosen_jobs(runs, time, memory)
    error = np.abs(np.log(step_seconds(time, jobs).total / np.array([row.step_seconds for row in runs])))
    error = error / np.array([row.job.width for row in runs])
    kinds = run_kind(jobs)
    return IntervalConstants(
        **{name: float(np.quantile(error[kinds == index], 0.8)) for index, name in enumerate(KINDS)}
    )


def chosen_jobs(runs: list[PublishedRun], time: TimeConstants, memory: MemoryConstants) -> JobTable:
    """Return one job per row: of the possible layouts of an incomplete row, the one that a trainer would choose."""
    jobs = [row.job for row in runs]
    table = job_table([choice for job in jobs for choice in job.choices])
    return table.select(np.array(best_choice_per_job(jobs, table, time, memory)))


def _weights(runs: list[PublishedRun]) -> Array:
    count = Counter(row.group for row in runs)
    source_weights = [min(count[row.group], A_SOURCE_COUNTS) / count[row.group] for row in runs]
    precision_weights = [LOW_PRECISION_COUNTS if row.low_precision else 1.0 for row in runs]
    return np.sqrt(np.array(source_weights)) * np.array(precision_weights)


def _bounded(kind: type[TimeConstants] | type[MemoryConstants]) -> tuple[list[str], Array, Array]:
    low, high = np.log(np.array([bounds(field) for field in fields(kind)])).T
    return [field.name for field in fields(kind)], low, high


def _constants(kind: type[Constants], logarithms: Array) -> Constants:
    names = [field.name for field in fields(kind)]
    return kind(**dict(zip(names, np.exp(logarithms), strict=True)))


def write(time: TimeConstants, memory: MemoryConstants, interval: IntervalConstants) -> None:
    """Write the three tables with four digits."""
    lines = ["# Fitted by benchmarks/fit_planner.py; what each is, and its bounds: cost/estimate/constants.py."]
    for name, table in (("time", time), ("memory", memory), ("interval", interval)):
        lines += ["", f"[{name}]"]
        lines += [f"{field.name} = {float(f'{getattr(table, field.name):.4g}')}" for field in fields(table)]
    FITTED.write_text("\n".join(lines) + "\n")


def main(path: Path) -> None:
    """Fit and write all three tables."""
    runs = read_published_runs(path)
    timed = [row for row in step_time_rows(runs) if not row.four_bits]
    memory = fit_memory([row for row in runs if row.has_rank_memory], constants.memory_constants())
    time = fit_time(timed, constants.time_constants())
    time = fit_time(timed, time)
    at_bounds = [f.name for f in fields(time) if min(abs(np.log(getattr(time, f.name) / np.array(bounds(f))))) < 0.01]
    print("at a bound:", ", ".join(at_bounds))
    write(time, memory, fit_intervals(timed, time, memory))


if __name__ == "__main__":
    main(ROWS)
