"""Counted FLOPs of float8 products and of attention with a window, against their formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from phalanx.model.attention import attend
from phalanx.train.profiling.flop_counter import FlopCounter

ROWS, INNER, OUT, EXPERTS = 32, 64, 48, 4


def scaled_product(rows: Tensor) -> Tensor:
    scales = [torch.empty(shape, device="meta") for shape in ((ROWS, 1), (1, OUT))]
    columns = rows.new_empty(OUT, INNER).T
    return torch._scaled_mm(rows, columns, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16)


def scaled_grouped_product(rows: Tensor) -> Tensor:
    scales = [torch.empty(shape, device="meta") for shape in ((ROWS,), (EXPERTS, OUT))]
    columns = rows.new_empty(EXPERTS, OUT, INNER).transpose(1, 2)
    offsets = torch.empty(EXPERTS, dtype=torch.int32, device="meta")
    return torch._scaled_grouped_mm(rows, columns, *scales, offsets, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("product", [scaled_product, scaled_grouped_product])
def test_float8_products_are_counted(product: Callable[[Tensor], Tensor]) -> None:
    rows = torch.empty(ROWS, INNER, dtype=torch.float8_e4m3fn, device="meta")
    with FlopCounter() as counter:
        assert product(rows).shape == (ROWS, OUT)
    assert counter.flops == 2 * ROWS * INNER * OUT


@pytest.mark.parametrize("window", [1, 2, 16])
def test_window_counts_visible_pairs(window: int) -> None:
    tokens, heads, head_dim = 512, 2, 8
    x = torch.randn(1, tokens, heads, head_dim)
    with FlopCounter() as counter:
        attend(x, x, x, None, window=window)
    first_pairs = window * window / 2
    assert counter.flops == 4 * heads * head_dim * (first_pairs + (tokens - window) * window)
