"""The measured peak is 2 n^3 operations over the best time, here with a simulated clock."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from phalanx.train.profiling import peak_flops
from phalanx.train.profiling.peak_flops import measure_peak_flops


@pytest.mark.parametrize("size", [8, 32])
def test_measure_peak_flops_equals_2_n_cubed_over_best_time(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = itertools.accumulate(itertools.chain.from_iterable((1.0, seconds) for seconds in (0.5, 0.25, 4.0)))
    monkeypatch.setattr(time, "perf_counter", lambda: next(ends))
    assert measure_peak_flops(torch.device("cpu"), torch.float32, size, rounds=3) == 2 * size**3 / 0.25


def test_measure_peak_flops_multiplies_once_per_round_in_given_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: seen.append((a.dtype, a.shape, b.shape)) or mm(a, b))
    measure_peak_flops(torch.device("cpu"), torch.bfloat16, 16, rounds=4)
    assert seen == [(torch.bfloat16, (16, 16), (16, 16))] * 4


def test_measure_peak_flops_limits_matrix_size_on_slow_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated clock advances one nanosecond per operation: a product of size 128 is long enough to time, so 256
    is not tried."""
    now, sides = [0.0], []

    def multiplied(a: torch.Tensor, b: torch.Tensor) -> None:
        sides.append(len(a))
        now[0] += 2 * len(a) ** 3 * 1e-9

    monkeypatch.setattr(torch, "mm", multiplied)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert measure_peak_flops(torch.device("cpu"), torch.float32, rounds=2) == pytest.approx(1e9)
    assert sides == [128, 128]


@pytest.mark.parametrize(
    ("has_instructions", "bf16_flops", "expected"), [(False, 9e9, "fp32"), (True, 2e9, "bf16"), (True, 1.1e9, "fp32")]
)
def test_fastest_precision_needs_instructions_and_a_clear_gain(
    has_instructions: bool, bf16_flops: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 in software is never chosen, whatever its measured speed. Products are timed with one thread."""
    threads = torch.get_num_threads()

    def measured(_: torch.device, dtype: torch.dtype) -> float:
        assert torch.get_num_threads() == 1
        return bf16_flops if dtype == torch.bfloat16 else 1e9

    monkeypatch.setattr(peak_flops, "has_fast_bf16", lambda _: has_instructions)
    monkeypatch.setattr(peak_flops, "measure_peak_flops", measured)
    assert peak_flops.fastest_precision(torch.device("cpu")) == expected
    assert torch.get_num_threads() == threads
