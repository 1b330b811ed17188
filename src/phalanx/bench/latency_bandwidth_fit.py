"""Latency and bandwidth of an operation, fitted to a sweep of sizes with one or two linear pieces.

A piece is a line, t = latency + size / bandwidth (alpha-beta; Hockney, Parallel Computing 20, 1994). With two pieces, t
is the maximum (a latency floor, then a saturated link), or the minimum (a library that switches to another algorithm
when that is faster, as NCCL does for all-reduce). Errors are relative: a microsecond in ten counts as much as a
millisecond in ten.

Why: `docs/design/decisions/two-line-fit.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
WARN_ABOVE = 0.15
"""Relative error above which a fit is doubtful."""
MIN_SIZES_PER_PIECE = 3
"""Minimum number of sizes in a piece, because any two points are on a line."""
ROUNDING_ERROR = 1e-12
"""Relative error that rounding explains."""


@dataclass(frozen=True)
class LinearPiece:
    """A line: seconds = latency_seconds + size in bytes x seconds_per_byte."""

    latency_seconds: float
    seconds_per_byte: float
    """Seconds per byte; 0 if time does not grow with size."""


@dataclass(frozen=True)
class PiecewiseFit:
    """Fitted time as a function of size, valid only for the measured sizes and rank counts."""

    pieces: tuple[LinearPiece, ...]
    combination: Literal["max", "min"]
    """Combination of the pieces: the maximum or the minimum of their times."""
    sizes_bytes: tuple[float, ...]
    residuals: tuple[float, ...]
    """Predicted / measured - 1, for each size."""

    @property
    def mean_error(self) -> float:
        """Mean of the residuals' absolute values."""
        return float(np.mean(np.abs(self.residuals)))

    @property
    def max_error(self) -> float:
        """Maximum of the residuals' absolute values."""
        return float(np.max(np.abs(self.residuals)))

    @property
    def is_poor(self) -> bool:
        """True if the error of some size exceeds `WARN_ABOVE`."""
        return self.max_error > WARN_ABOVE


def fit_latency_bandwidth(sizes_bytes: Sequence[float], seconds: Sequence[float]) -> PiecewiseFit | None:
    """Fit one line, or two lines with a break at any size, by relative least squares.

    The two parameters of the second line and the break must improve the Bayesian information criterion (Schwarz,
    Ann. Statist. 6, 1978). The result is None for fewer than two sizes. Raises ValueError if a size or a time is
    not positive.
    """
    x = np.asarray(sizes_bytes, float)
    t = np.asarray(seconds, float)
    if len(x) != len(t) or (len(x) and min(x.min(), t.min()) <= 0):
        raise ValueError("sizes and times must be as many, and above 0")
    if len(np.unique(x)) < 2:
        return None
    order = np.argsort(x, kind="stable")
    x, t = x[order], t[order]
    fits = [_evaluate_pieces("max", (_fit_line(x, t),), x, t)]
    for split in range(MIN_SIZES_PER_PIECE, len(x) - MIN_SIZES_PER_PIECE + 1):
        if x[split - 1] < x[split]:
            left = _fit_line(x[:split], t[:split])
            right = _fit_line(x[split:], t[split:])
            bends_up = right.seconds_per_byte > left.seconds_per_byte
            fits.append(_evaluate_pieces("max" if bends_up else "min", (left, right), x, t))
    return min(fits, key=_information_criterion)


def _fit_line(x: Numbers, t: Numbers) -> LinearPiece:
    """Fit a line by relative least squares with nonnegative parameters."""
    scale = x.max()
    matrix = np.stack([1 / t, x / scale / t], axis=1)
    ones = np.ones_like(t)
    (latency, slope), *_ = np.linalg.lstsq(matrix, ones, rcond=None)
    if latency < 0:
        latency = 0.0
        slope = matrix[:, 1].sum() / (matrix[:, 1] ** 2).sum()
    elif slope < 0:
        latency = matrix[:, 0].sum() / (matrix[:, 0] ** 2).sum()
        slope = 0.0
    return LinearPiece(float(latency), float(slope / scale))


def _evaluate_pieces(
    combination: Literal["max", "min"], pieces: tuple[LinearPiece, ...], x: Numbers, t: Numbers
) -> PiecewiseFit:
    lines = np.stack([piece.latency_seconds + piece.seconds_per_byte * x for piece in pieces])
    residuals = (lines.max(axis=0) if combination == "max" else lines.min(axis=0)) / t - 1
    return PiecewiseFit(pieces, combination, tuple(x.tolist()), tuple(residuals.tolist()))


def _information_criterion(fit: PiecewiseFit) -> float:
    """Return n ln(mean square) + k ln n."""
    count = len(fit.residuals)
    parameters = 3 * len(fit.pieces) - 1
    mean_square = max(float(np.mean(np.square(fit.residuals))), ROUNDING_ERROR**2)
    return count * float(np.log(mean_square)) + parameters * float(np.log(count))
