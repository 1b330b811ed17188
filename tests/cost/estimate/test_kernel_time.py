"""Matrix products, attention and memory-bound operations on one device."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cost.estimate.constants import time_constants
from phalanx.cost.estimate.kernel_time import attention_seconds, linear_seconds, matmul_seconds, memory_pass_seconds
from phalanx.cost.kinds import AttentionKernel
from tests.helpers.job_tables import make_job_row, make_job_table

TIME_CONSTANTS = time_constants()
MATMUL_SIZES = st.integers(1, 20_000)


def column(value: float) -> np.ndarray:
    return np.array([float(value)])


def test_constants_of_a_generation_default_to_those_of_the_generation_before():
    generations = np.array([0.0, 1.0, 2.0])
    c = TIME_CONSTANTS
    assert list(c.of_generation("gemm", generations)) == [c.gemm_0, c.gemm_1, c.gemm_2]
    assert list(c.of_generation("link", generations, oldest=c.link)) == [c.link, c.link, c.link_2]


@settings(max_examples=80, deadline=None)
@given(
    m=MATMUL_SIZES, n=MATMUL_SIZES, k=MATMUL_SIZES, machine=st.sampled_from(["a100", "h100", "b200", "tpuv4", "mi300x"])
)
def test_matmul_seconds_respect_peak_flops_and_memory_bandwidth(m, n, k, machine):
    row = make_job_row(machine=machine)
    seconds = float(matmul_seconds(TIME_CONSTANTS, make_job_table(row), column(m), column(n), column(k))[0])
    assert seconds >= 2 * m * n * k / (1.05 * row["matmul_flops"])
    assert seconds >= 2 * (m * k + k * n + m * n) / row["hbm_bytes_per_second"]


@settings(max_examples=60, deadline=None)
@given(m=MATMUL_SIZES, n=MATMUL_SIZES, k=MATMUL_SIZES, factor=st.sampled_from([2, 3, 8]))
def test_matmul_seconds_never_decrease_with_larger_sizes(m, n, k, factor):
    table = make_job_table(make_job_row())
    seconds = matmul_seconds(TIME_CONSTANTS, table, column(m), column(n), column(k))
    for sizes in ((factor * m, n, k), (m, factor * n, k), (m, n, factor * k)):
        assert matmul_seconds(TIME_CONSTANTS, table, *map(column, sizes)) >= seconds
    assert matmul_seconds(TIME_CONSTANTS, table, column(m), column(n), column(k), batch=factor) >= seconds


def test_large_matmul_reaches_fitted_training_efficiency():
    row = make_job_row()
    efficiency = (
        2
        * 16384**3
        / float(matmul_seconds(TIME_CONSTANTS, make_job_table(row), *map(column, (16384, 16384, 16384)))[0])
    )
    assert efficiency / row["matmul_flops"] == pytest.approx(TIME_CONSTANTS.gemm_1, rel=0.1)


def test_single_tile_matmul_stays_below_ten_percent_of_peak():
    row = make_job_row()
    efficiency = (
        2
        * 128
        * 128
        * 4096
        / float(matmul_seconds(TIME_CONSTANTS, make_job_table(row), *map(column, (128, 128, 4096)))[0])
    )
    assert efficiency < 0.1 * row["matmul_flops"]


def test_low_precision_speeds_up_linear_layers_but_not_attention():
    plain, low = make_job_row(), make_job_row(low_precision=1)
    sizes = tuple(map(column, (8192, 8192, 8192)))
    assert matmul_seconds(TIME_CONSTANTS, make_job_table(low), *sizes) < 0.8 * matmul_seconds(
        TIME_CONSTANTS, make_job_table(plain), *sizes
    )
    assert matmul_seconds(TIME_CONSTANTS, make_job_table(low), *sizes, linear=False) == matmul_seconds(
        TIME_CONSTANTS, make_job_table(plain), *sizes
    )
    assert (
        attention_seconds(TIME_CONSTANTS, make_job_table(low))[0]
        == attention_seconds(TIME_CONSTANTS, make_job_table(plain))[0]
    )


def test_linear_backward_takes_about_twice_the_forward():
    forward, inputs, weights = linear_seconds(
        TIME_CONSTANTS, make_job_table(make_job_row()), *map(column, (8192, 16384, 8192))
    )
    assert (inputs + weights) / forward == pytest.approx(2, rel=0.15)


def test_attention_seconds_decrease_from_unfused_to_flash_kernels():
    """Writing scores to memory costs more than any flash kernel, and separate kernels cost most."""
    kinds = (AttentionKernel.SEPARATE, AttentionKernel.FUSED, AttentionKernel.FLASH_1, AttentionKernel.FLASH_2)
    rows = [make_job_row(machine="a100", attention=kind, sequence=4096) for kind in kinds]
    forward, backward = attention_seconds(TIME_CONSTANTS, make_job_table(*rows))
    assert (np.diff(forward) < 0).all()
    assert (backward > forward).all()


def test_ring_attention_costs_its_flash_kernels_and_merges():
    """Ring attention writes no scores: each step merges outputs and
    gradients, which grow with the sequence length only."""
    kinds = (AttentionKernel.FLASH_2, AttentionKernel.RING, AttentionKernel.SEPARATE)
    jobs = make_job_table(*(make_job_row("llama3-8b", cp=8, attention=kind, sequence=131_072) for kind in kinds))
    for flash, ring, separate in attention_seconds(TIME_CONSTANTS, jobs):
        assert flash < ring < 1.5 * flash < separate / 2


def test_ring_attention_has_no_kernels_of_new_devices():
    kinds = (AttentionKernel.FLASH_3, AttentionKernel.RING)
    for machine in ("h100", "b200"):
        rows = [make_job_row("llama3-8b", machine=machine, cp=8, attention=kind, sequence=131_072) for kind in kinds]
        for newest, ring in attention_seconds(TIME_CONSTANTS, make_job_table(*rows)):
            assert ring > 1.5 * newest


def test_flash_attention_seconds_grow_quadratically_with_sequence():
    short, long = attention_seconds(
        TIME_CONSTANTS, make_job_table(make_job_row(sequence=32768), make_job_row(sequence=65536))
    )[0]
    assert long / short == pytest.approx(4, rel=0.1)


def test_attention_is_slower_when_head_dim_is_not_a_tile_multiple():
    aligned, unaligned = (
        make_job_row(machine="a100", attention=AttentionKernel.FUSED, head_dim=dim, value_dim=dim) for dim in (152, 150)
    )
    fast, slow = attention_seconds(TIME_CONSTANTS, make_job_table(aligned, unaligned))[0]
    assert slow > 1.2 * fast


def test_memory_pass_seconds_equal_bytes_over_bandwidth():
    row = make_job_row()
    seconds = memory_pass_seconds(TIME_CONSTANTS, make_job_table(row), column(1e9))
    assert seconds == pytest.approx(1e9 / (row["hbm_bytes_per_second"] * TIME_CONSTANTS.hbm_1))


def test_fp8_recipe_casts_operands_and_keeps_weight_gradients_in_16_bits():
    sizes = tuple(map(column, (8192, 8192, 8192)))
    rows = [make_job_row(), make_job_row(low_precision=1), make_job_row(low_precision=1, trainer="Phalanx")]
    plain, low, recipe = (linear_seconds(TIME_CONSTANTS, make_job_table(row), *sizes) for row in rows)
    assert low[0] < recipe[0] < plain[0]
    assert low[1] < recipe[1] < plain[1]
    assert low[2] < recipe[2] == plain[2]
    compiled = make_job_row(low_precision=1, trainer="Phalanx", compiled=1)
    eager = linear_seconds(TIME_CONSTANTS, make_job_table(rows[2]), *sizes, readers=3)
    fused = linear_seconds(TIME_CONSTANTS, make_job_table(compiled), *sizes, readers=3)
    assert low[0] < fused[0] < recipe[0] < eager[0]
