"""Predictions of runs: time with an interval, memory with the probability of OOM, and speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.estimate.constants import (
    MemoryConstants,
    TimeConstants,
    interval_constants,
    memory_constants,
    time_constants,
)
from phalanx.cost.estimate.job_table import JobTable, job_table
from phalanx.cost.estimate.memory import estimate_memory, oom_probability
from phalanx.cost.estimate.prediction_interval import log_half_width
from phalanx.cost.estimate.step_time import step_seconds
from phalanx.cost.kinds import Column
from phalanx.plan.tables.csv_rows import Row
from phalanx.plan.tables.row_to_job import TableJob, job_from_row, state_memory
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import GIB

MAX_ASSUMED_OOM_PROBABILITY = 0.5
"""Maximum P(OOM) of a choice that a row leaves open: it more likely fits than not.

The row was run, and a layout that was run can have a smaller margin than an offered layout (`MAX_OOM_PROBABILITY`).
"""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Prediction of one job's step; the interval contains the true time in 80 of 100 cases."""

    id: str
    trainer: str
    """Trainer that the row describes, whose step this is."""
    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    memory_gib: float
    """Allocated memory on the fullest rank."""
    p_oom: float
    tflops_per_gpu: float
    """Model FLOPs, without recomputation."""
    mfu: float
    """Model FLOPs utilization in percent of the peak at the precision of training."""
    hfu: float
    """Hardware FLOPs utilization in percent, including recomputation."""
    assumed: list[str]
    """Options that the row leaves open and the planner chose as a trainer would."""


@dataclass(frozen=True)
class PredictionFailure:
    """Row that cannot be predicted."""

    id: str
    reason: str
    memory_gib: float | None = None
    """Model-state memory of a row that requests only that."""


def predict_rows(rows: Sequence[Row]) -> list[Prediction | PredictionFailure]:
    """Return the predictions of all rows of a table, in order; one pass evaluates all their choices."""
    jobs_or_failures: list[TableJob | PredictionFailure] = []
    for row in rows:
        try:
            jobs_or_failures.append(job_from_row(row))
        except UserError as error:
            jobs_or_failures.append(
                PredictionFailure(row.get("id", ""), str(error).replace("\n", ";"), state_memory(row))
            )
    jobs = [job for job in jobs_or_failures if isinstance(job, TableJob)]
    predictions = iter(predict_jobs(jobs))
    return [next(predictions) if isinstance(job, TableJob) else job for job in jobs_or_failures]


def predict_jobs(jobs: Sequence[TableJob], time: TimeConstants | None = None) -> Iterator[Prediction]:
    """Yield a prediction per job, from the fastest choice that is likely to fit (or the smallest)."""
    if not jobs:
        return
    time = time or time_constants()
    choices = job_table([choice for job in jobs for choice in job.choices])
    seconds, memory, risk = _estimate_costs(choices, time, memory_constants())
    width = log_half_width(interval_constants(), choices)
    recomputed_flops = [flops for job in jobs for flops in job.recomputed_flops]
    for job, index in zip(jobs, _find_best_choices(jobs, seconds, memory, risk), strict=True):
        interval_factor = float(np.exp(width[index] * job.width))
        speed = job.flops_per_step / float(seconds[index])
        yield Prediction(
            id=job.name,
            trainer=job.trainer,
            step_time_s=float(seconds[index]),
            step_time_low_s=float(seconds[index]) / interval_factor,
            step_time_high_s=float(seconds[index]) * interval_factor,
            memory_gib=float(memory[index]) / GIB,
            p_oom=float(risk[index]),
            tflops_per_gpu=speed / job.ranks / 1e12,
            mfu=100 * speed / job.peak_flops,
            hfu=100 * (speed + recomputed_flops[index] / float(seconds[index])) / job.peak_flops,
            assumed=job.assumed,
        )


def best_choice_per_job(
    jobs: Sequence[TableJob], every: JobTable, time: TimeConstants, memory: MemoryConstants
) -> list[int]:
    """Return the index of each job's best choice in the columns of all jobs' choices."""
    return list(_find_best_choices(jobs, *_estimate_costs(every, time, memory)))


def _estimate_costs(jobs: JobTable, time: TimeConstants, memory: MemoryConstants) -> tuple[Column, Column, Column]:
    """Return the step seconds, the bytes of the fullest rank, and P(OOM)."""
    memory_use = estimate_memory(memory, jobs)
    return step_seconds(time, jobs).total, memory_use.allocated_bytes, oom_probability(memory, jobs, memory_use)


def _find_best_choices(jobs: Sequence[TableJob], seconds: Column, memory: Column, risk: Column) -> Iterator[int]:
    offset = 0
    for job in jobs:
        job_choices = slice(offset, offset + len(job.choices))
        yield offset + best_choice(seconds[job_choices], memory[job_choices], risk[job_choices])
        offset = job_choices.stop


def best_choice(seconds: Column, memory: Column, risk: Column) -> int:
    """Return the index of the fastest choice that is likely to fit, or of the smallest."""
    fits: NDArray[np.bool_] = risk < MAX_ASSUMED_OOM_PROBABILITY
    return int(np.argmin(np.where(fits, seconds, np.inf)) if fits.any() else np.argmin(memory))
