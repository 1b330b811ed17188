"""Products, attention and passes over memory on one device."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cost.estimate.constants import time_constants
from phalanx.cost.estimate.kernel_time import attention_seconds, linear_seconds, matmul_seconds, memory_pass_seconds
from phalanx.cost.kinds import AttentionKernel
from tests.helpers.job_tables import job, jobs

C = time_constants()
SIZE = st.integers(1, 20_000)


def column(value: float) -> np.ndarray:
    return np.array([float(value)])


@settings(max_examples=80, deadline=None)
@given(m=SIZE, n=SIZE, k=SIZE, machine=st.sampled_from(["a100", "h100", "b200", "tpuv4", "mi300x"]))
def test_matmul_seconds_respect_peak_flops_and_memory_bandwidth(m, n, k, machine):
    row = job(machine=machine)
    seconds = float(matmul_seconds(C, jobs(row), column(m), column(n), column(k))[0])
    assert seconds >= 2 * m * n * k / (1.05 * row["matmul_flops"])
    assert seconds >= 2 * (m * k + k * n + m * n) / row["hbm_bytes_per_second"]


@settings(max_examples=60, deadline=None)
@given(m=SIZE, n=SIZE, k=SIZE, more=st.sampled_from([2, 3, 8]))
def test_matmul_seconds_never_decrease_with_larger_sizes(m, n, k, more):
    table = jobs(job())
    once = matmul_seconds(C, table, column(m), column(n), column(k))
    for sizes in ((more * m, n, k), (m, more * n, k), (m, n, more * k)):
        assert matmul_seconds(C, table, *map(column, sizes)) >= once
    assert matmul_seconds(C, table, column(m), column(n), column(k), batch=more) >= once


def test_large_matmul_reaches_fitted_training_efficiency():
    row = job()
    reached = 2 * 16384**3 / float(matmul_seconds(C, jobs(row), *map(column, (16384, 16384, 16384)))[0])
    assert reached / row["matmul_flops"] == pytest.approx(C.gemm_1, rel=0.1)


def test_single_tile_matmul_stays_below_ten_percent_of_peak():
    row = job()
    reached = 2 * 128 * 128 * 4096 / float(matmul_seconds(C, jobs(row), *map(column, (128, 128, 4096)))[0])
    assert reached < 0.1 * row["matmul_flops"]


def test_low_precision_speeds_up_linear_layers_but_not_attention():
    plain, low = job(), job(low_precision=1)
    sizes = tuple(map(column, (8192, 8192, 8192)))
    assert matmul_seconds(C, jobs(low), *sizes) < 0.8 * matmul_seconds(C, jobs(plain), *sizes)
    assert matmul_seconds(C, jobs(low), *sizes, linear=False) == matmul_seconds(C, jobs(plain), *sizes)
    assert attention_seconds(C, jobs(low))[0] == attention_seconds(C, jobs(plain))[0]


def test_linear_backward_takes_about_twice_the_forward():
    forward, inputs, weights = linear_seconds(C, jobs(job()), *map(column, (8192, 16384, 8192)))
    assert (inputs + weights) / forward == pytest.approx(2, rel=0.15)


def test_attention_seconds_decrease_from_unfused_to_flash_kernels():
    """Scores that are written to memory cost more than any flash kernel, and separate kernels most."""
    kinds = (AttentionKernel.SEPARATE, AttentionKernel.FUSED, AttentionKernel.FLASH_1, AttentionKernel.FLASH_2)
    rows = [job(machine="a100", attention=kind, sequence=4096) for kind in kinds]
    forward, backward = attention_seconds(C, jobs(*rows))
    assert (np.diff(forward) < 0).all()
    assert (backward > forward).all()
    ring, flash = (
        job("llama3-8b", cp=4, attention=kind) for kind in (AttentionKernel.RING_PLAIN, AttentionKernel.FLASH_3)
    )
    plain, fast = attention_seconds(C, jobs(ring, flash))[0]
    assert plain > 2 * fast


def test_flash_attention_seconds_grow_quadratically_with_sequence():
    short, long = attention_seconds(C, jobs(job(sequence=32768), job(sequence=65536)))[0]
    assert long / short == pytest.approx(4, rel=0.1)


def test_attention_is_slower_when_head_dim_is_not_a_tile_multiple():
    good, odd = (
        job(machine="a100", attention=AttentionKernel.FUSED, head_dim=dim, value_dim=dim) for dim in (152, 150)
    )
    fast, slow = attention_seconds(C, jobs(good, odd))[0]
    assert slow > 1.2 * fast


def test_memory_pass_seconds_equal_bytes_over_bandwidth():
    row = job()
    seconds = memory_pass_seconds(C, jobs(row), column(1e9))
    assert seconds == pytest.approx(1e9 / (row["hbm_bytes_per_second"] * C.hbm_1))
