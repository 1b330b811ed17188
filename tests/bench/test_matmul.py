"""Benchmarked matmuls and attention: their shapes, FLOPs and seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.bench import matmul
from phalanx.bench.layer_shapes import AttentionShape, MatmulShape
from phalanx.bench.matmul import (
    Calls,
    _make_attention_calls,
    _make_matmul_calls,
    _make_ring_calls,
    benchmark_attention,
    benchmark_matmul,
)
from phalanx.model import attention
from phalanx.parallel.block_attention import attention_with_lse
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.train.profiling.flop_counter import FlopCounter
from tests.helpers.small_runs import small_run

CPU = torch.device("cpu")


@pytest.mark.parametrize("product", [MatmulShape(1, 12, 8, 4), MatmulShape(3, 12, 8, 4)])
def test_benchmark_matmul_calls_have_stated_shapes_and_flops(product: MatmulShape) -> None:
    shapes = {"forward": (product.m, product.n), "inputs": (product.m, product.k), "weights": (product.n, product.k)}
    for name, call in _make_matmul_calls(product, torch.float32, CPU).items():
        with FlopCounter() as meter:
            out = call()
        assert out.shape[-2:] == shapes[name]
        assert meter.flops == product.flops


@pytest.mark.parametrize(
    ("calls", "masked"), [(_make_attention_calls, False), (_make_attention_calls, True), (_make_ring_calls, False)]
)
def test_benchmark_attention_calls_have_stated_flops(masked: bool, calls: Callable[..., Calls]) -> None:
    core = AttentionShape(batch=2, heads=4, kv_heads=2, queries=16, keys=16, head_dim=8, causal=True, masked=masked)
    for times, call in zip((1, 2), calls(core, torch.float32, CPU).values(), strict=True):
        with FlopCounter() as meter:
            call()
        assert meter.flops == times * core.flops


@pytest.mark.parametrize("changes", [{"layout.cp": 2}, {"layout.cp": 2, "data.mask_documents": False}])
def test_benchmark_attention_times_steps_of_ring(
    changes: dict[str, Any], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[bool] = []

    def count(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        steps.append(causal)
        return attention_with_lse(q, k, v, causal)

    monkeypatch.setattr(matmul, "attention_with_lse", count)
    first, later = benchmark_attention(ResolvedRun(small_run(text, tmp_path, changes), 2), CPU, 1)
    assert first["flops"] == later["flops"]
    assert set(steps) == {True, False}


def test_benchmark_attention_goes_by_documents_as_the_model_does(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run(text, tmp_path, {})
    document_starts: list[Tensor] = []

    def note_bounds(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, *_: object) -> Tensor:
        document_starts.append(bounds)
        return q * k.sum() * v.sum()

    monkeypatch.setattr(attention, "attend_within_documents", note_bounds)
    (by_document,) = benchmark_attention(ResolvedRun(run, 1), CPU, 1)
    row_tokens = run.training.seq_len
    assert document_starts[0].tolist() == list(range(0, by_document["batch"] * row_tokens + 1, row_tokens))


def test_benchmark_attention_has_the_cap_and_the_sinks_of_a_layer(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"model.attention_softcap": 50.0, "model.attention_sinks": True}
    dials: list[tuple[object, ...]] = []

    def note_dials(*arguments: Tensor) -> Tensor:
        dials.append(arguments[4:])
        return attention.attend(*arguments)

    monkeypatch.setattr(matmul, "attend", note_dials)
    run = small_run(text, tmp_path, changes)
    (row,) = benchmark_attention(ResolvedRun(run, 1), CPU, 1)
    window, sinks, softcap = dials[0]
    assert (window, tuple(sinks.shape), softcap) == (None, (run.model.num_heads,), 50.0)
    assert row["softcap"] == 50.0


def test_layer_benchmark_rows_contain_seconds_and_flops(text: Path, tmp_path: Path) -> None:
    run: RunSpec = small_run(text, tmp_path, {})
    for rows, passes in (
        (benchmark_matmul(ResolvedRun(run, 1), CPU, 2), ("forward", "inputs", "weights")),
        (benchmark_attention(ResolvedRun(run, 1), CPU, 2), ("forward", "backward")),
    ):
        assert rows
        assert all(row["flops"] > 0 and row[f"{direction}_seconds"] > 0 for row in rows for direction in passes)
