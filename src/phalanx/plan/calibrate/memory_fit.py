"""Fit of the memory constants of a machine to its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.calibrate.measured_run import MeasuredRun

SHARE_PRIOR = 0.2
"""Standard deviation of the prior of the bytes of memory per counted byte, whose mean is 1."""
BUFFER_PRIOR = 2.0
"""Standard deviation of the prior of the additional bytes per byte of buffers, whose mean is 0."""
MEMORY_NOISE = 0.03
"""Standard deviation of the logarithm of a process's memory around its prediction."""
Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class MemoryFit:
    """Constants of memory, and the memory of the runs that they predict."""

    process_bytes: float
    """Bytes of a process that trains nothing."""
    bytes_per_counted_byte: float
    buffer_overhead: float
    """Additional bytes per byte of buffers."""
    predicted: Array


def fit_memory(runs: Sequence[MeasuredRun]) -> MemoryFit:
    """Return memory constants that explain the memory of runs; none of them is negative."""
    counted_bytes = np.array([run.counted_peak_bytes for run in runs], float)
    peak_bytes = np.array([run.memory_bytes for run in runs])
    buffer_bytes = np.array([run.memory.communication for run in runs], float)
    columns = np.stack([np.ones(len(runs)), counted_bytes, buffer_bytes], axis=1)
    priors = np.diag([0.0, 1 / SHARE_PRIOR, 1 / BUFFER_PRIOR])
    rows = np.vstack([columns / peak_bytes[:, None] / MEMORY_NOISE, priors])
    targets = np.concatenate([np.ones(len(runs)) / MEMORY_NOISE, priors @ [0.0, 1.0, 0.0]])
    solution = _nonnegative_least_squares(rows, targets)
    process_bytes, bytes_per_counted_byte, extra_buffer_bytes = (float(value) for value in solution)
    return MemoryFit(
        process_bytes=process_bytes,
        bytes_per_counted_byte=bytes_per_counted_byte,
        buffer_overhead=extra_buffer_bytes / bytes_per_counted_byte,
        predicted=columns @ solution,
    )


def _nonnegative_least_squares(rows: Array, targets: Array) -> Array:
    """Return a solution of rows @ x = targets without negative values, by elimination.

    While a value is negative, the most negative one is set to zero, and the others are fitted again. This may differ
    from the optimum, which the few columns of a fit do not need.
    """
    active = list(range(rows.shape[1]))
    solution = np.zeros(rows.shape[1])
    while active:
        values = np.linalg.lstsq(rows[:, active], targets, rcond=None)[0]
        if values.min() >= 0:
            solution[active] = values
            break
        del active[int(values.argmin())]
    return solution
