"""Prediction intervals by kind of run, from the errors on published runs of that kind."""

from __future__ import annotations

import numpy as np

from phalanx.cost.estimate.constants import IntervalConstants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.kinds import Column

KINDS = ("low_precision", "experts", "sharded", "small", "stated")


def run_kind(jobs: JobTable) -> Column:
    """Return the kind of each job as an index into `KINDS`: the first that applies."""
    is_small = jobs.width <= 2048
    conditions = [jobs.low_precision > 0, jobs.experts > 0, jobs.zero_stage >= 3, is_small]
    return np.select(conditions, [0.0, 1.0, 2.0, 3.0], 4.0) + np.zeros(jobs.count)


def log_half_width(constants: IntervalConstants, jobs: JobTable) -> Column:
    """Return half of the 80 % interval's width, as a logarithm."""
    widths = np.array([getattr(constants, name) for name in KINDS])
    return widths[run_kind(jobs).astype(np.int64)]
