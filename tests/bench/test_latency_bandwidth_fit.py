"""Fits of piecewise latency and bandwidth: to exact times, and to published sweeps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.bench.latency_bandwidth_fit import LinearPiece, fit_latency_bandwidth

SIZES = [2.0**power for power in range(10, 31)]
MIB = 2**20
# nccl-tests on 8 GPUs of one node, 1 MiB to 8 GiB doubling, out-of-place microseconds, from SimuMax,
# simu_tools/efficency_test/nccl_fit.py.
ALL_REDUCE_US = [46.24, 45.71, 57.93, 86.55, 125.9, 203.3, 328.4, 579.2, 1090.5, 2106.2, 4022.4, 7924.8, 15736, 31450]
ALL_TO_ALL_US = [75.76, 75.06, 76.64, 79.10, 82.85, 129.9, 220.1, 398.7, 761.2, 1461.0, 2822.3, 5520.5, 10937, 21730]
SWEEP_SIZES = [MIB * 2.0**power for power in range(14)]

latencies = st.floats(1e-6, 1e-3)
slopes = st.floats(1e-12, 1e-8)


def piece_seconds(piece: LinearPiece) -> list[float]:
    return [piece.latency_seconds + piece.seconds_per_byte * size for size in SIZES]


def combine_pieces(first: LinearPiece, second: LinearPiece, combination: str) -> list[float]:
    longer_or_shorter = max if combination == "max" else min
    return [longer_or_shorter(pair) for pair in zip(piece_seconds(first), piece_seconds(second), strict=True)]


@given(latencies, slopes)
def test_fit_latency_bandwidth_recovers_single_line(latency: float, slope: float) -> None:
    fit = fit_latency_bandwidth(SIZES, [latency + slope * size for size in SIZES])
    assert fit is not None
    assert len(fit.pieces) == 1
    assert fit.pieces[0].latency_seconds == pytest.approx(latency, rel=1e-5)
    assert fit.pieces[0].seconds_per_byte == pytest.approx(slope, rel=1e-5)
    assert fit.max_error < 1e-9


@given(latencies, slopes, st.floats(4, 100), st.integers(4, 15), st.sampled_from(["max", "min"]))
def test_fit_latency_bandwidth_recovers_two_pieces(
    latency: float, slope: float, slope_ratio: float, crossing_index: int, combination: str
) -> None:
    """The pieces meet between two sizes. Each of them has more sizes than a line needs."""
    crossing_bytes, steep = 1.4 * SIZES[crossing_index], slope * slope_ratio
    gentle, steeper = LinearPiece(latency + (steep - slope) * crossing_bytes, slope), LinearPiece(latency, steep)
    first, second = (gentle, steeper) if combination == "max" else (steeper, gentle)
    fit = fit_latency_bandwidth(SIZES, combine_pieces(first, second, combination))
    assert fit is not None
    assert fit.combination == combination
    assert fit.max_error < 1e-9
    for piece, expected in zip(fit.pieces, (first, second), strict=True):
        assert piece_seconds(piece) == pytest.approx(piece_seconds(expected), rel=1e-5)
    for piece in fit.pieces:
        seconds = piece.latency_seconds + piece.seconds_per_byte * crossing_bytes
        assert seconds == pytest.approx(latency + steep * crossing_bytes, rel=1e-6)


def test_fit_latency_bandwidth_uses_min_of_pieces_for_published_all_reduce() -> None:
    """The library changes its algorithm with the size: only the minimum of two pieces fits these times within 8 %."""
    fit = fit_latency_bandwidth(SWEEP_SIZES, [us / 1e6 for us in ALL_REDUCE_US])
    assert fit is not None
    assert fit.combination == "min"
    assert fit.max_error < 0.08
    small, large = fit.pieces
    assert small.latency_seconds == pytest.approx(37.5e-6, rel=0.05)
    assert 1 / large.seconds_per_byte == pytest.approx(271.1e9, rel=0.02)
    assert not fit.is_poor


def test_fit_latency_bandwidth_finds_latency_floor_of_published_all_to_all() -> None:
    fit = fit_latency_bandwidth(SWEEP_SIZES, [us / 1e6 for us in ALL_TO_ALL_US])
    assert fit is not None
    assert fit.combination == "max"
    floor, link = fit.pieces
    assert floor.latency_seconds == pytest.approx(74.7e-6, rel=0.02)
    assert floor.seconds_per_byte < 1e-12
    assert 1 / link.seconds_per_byte == pytest.approx(387.1e9, rel=0.03)
    assert fit.max_error < 0.08


def test_fit_latency_bandwidth_is_poor_for_jagged_times() -> None:
    jagged = [1e-4, 3e-4, 1e-4, 3e-4, 1e-4, 3e-4, 1e-4, 3e-4]
    fit = fit_latency_bandwidth(SIZES[:8], jagged)
    assert fit is not None
    assert fit.is_poor
    assert len(fit.residuals) == 8
    assert fit.mean_error == pytest.approx(np.mean(np.abs(fit.residuals)))


def test_fit_latency_bandwidth_returns_single_piece_for_noisy_line() -> None:
    noise = np.random.default_rng(0).normal(1, 0.02, len(SIZES))
    fit = fit_latency_bandwidth(
        SIZES, [(2e-5 + size / 1e10) * factor for size, factor in zip(SIZES, noise, strict=True)]
    )
    assert fit is not None
    assert len(fit.pieces) == 1
    assert fit.pieces[0].latency_seconds == pytest.approx(2e-5, rel=0.05)


def test_fit_latency_bandwidth_returns_none_for_single_size() -> None:
    assert fit_latency_bandwidth([4096], [1e-5]) is None
    assert fit_latency_bandwidth([4096, 4096], [1e-5, 2e-5]) is None
    assert fit_latency_bandwidth([], []) is None


@pytest.mark.parametrize(("sizes", "times"), [([0.0, 1.0], [1.0, 1.0]), ([1.0, 2.0], [1.0, 0.0]), ([1.0, 2.0], [1.0])])
def test_fit_latency_bandwidth_rejects_invalid_sweep(sizes: list[float], times: list[float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        fit_latency_bandwidth(sizes, times)
