"""Benchmarked matmuls and attention: their shapes, FLOPs and seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx.bench.layer_shapes import AttentionShape, MatmulShape
from phalanx.bench.matmul import _attention_calls, _matmul_calls, benchmark_attention, benchmark_matmul
from phalanx.spec.run import RunSpec
from phalanx.train.profiling.flop_counter import FlopCounter
from tests.helpers.small_runs import small_run

CPU = torch.device("cpu")


@pytest.mark.parametrize("product", [MatmulShape(1, 12, 8, 4), MatmulShape(3, 12, 8, 4)])
def test_benchmark_matmul_calls_have_stated_shapes_and_flops(product: MatmulShape) -> None:
    shapes = {"forward": (product.m, product.n), "inputs": (product.m, product.k), "weights": (product.n, product.k)}
    for what, call in _matmul_calls(product, torch.float32, CPU).items():
        with FlopCounter() as meter:
            out = call()
        assert out.shape[-2:] == shapes[what]
        assert meter.flops == product.flops


@pytest.mark.parametrize("masked", [False, True])
def test_benchmark_attention_calls_have_stated_flops(masked: bool) -> None:
    core = AttentionShape(2, 4, 2, 16, 16, 8, causal=True, masked=masked)
    for times, call in zip((1, 2), _attention_calls(core, torch.float32, CPU).values(), strict=True):
        with FlopCounter() as meter:
            call()
        assert meter.flops == times * core.flops


def test_layer_benchmark_rows_contain_seconds_and_flops(text: Path, tmp_path: Path) -> None:
    run: RunSpec = small_run(text, tmp_path, {})
    for rows, passes in (
        (benchmark_matmul(run, 1, CPU, 2), ("forward", "inputs", "weights")),
        (benchmark_attention(run, 1, CPU, 2), ("forward", "backward")),
    ):
        assert rows
        assert all(each["flops"] > 0 and each[f"{what}_seconds"] > 0 for each in rows for what in passes)
