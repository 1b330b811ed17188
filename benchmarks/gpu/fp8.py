"""Compare matrix products in fp8, with a scale for each row, with bf16: speed and error."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.harness import Table, median_milliseconds, real_or_dry, relative_error

TITLE = "Matrix products in fp8 compared with bf16"
COLUMNS = (
    "product",
    "rows x inner x columns",
    "bf16, ms",
    "TFLOP/s",
    "fp8, ms",
    "TFLOP/s",
    "fp8 speedup",
    "speedup with casts",
    "error of bf16",
    "error of fp8",
    "limit",
    "passed",
)
TOKENS, SHRINK = real_or_dry((8192, 1), (256, 16))
PRODUCTS = {
    "queries and keys": (4096, 6144),
    "attention's output": (4096, 4096),
    "gate and up": (4096, 28672),
    "down": (14336, 4096),
    "head": (4096, 128256),
}
"""Inner width and columns of llama3-8b's products."""
NOTES = f"""
Forward products of llama3-8b on {TOKENS:,} tokens of normally distributed numbers. fp8 is `torch._scaled_mm` in e4m3
with a scale per row of both matrices, fast accumulation and bf16 output. "Speedup with casts" includes the compiled
casts of both matrices to fp8. Errors are the largest difference from fp64 in 64 rows, relative to the largest value. A
product passes if its fp8 error is below the limit, and fp8 without casts is faster than bf16.
"""
LIMIT, LARGEST = 0.1, torch.finfo(torch.float8_e4m3fn).max


def measure(table: Table) -> None:
    """Time each product."""
    for name, (inner, columns) in PRODUCTS.items():
        table.measure(name, partial(row, table, name, inner // SHRINK, columns // SHRINK))


def row(table: Table, name: str, inner: int, columns: int) -> list[str]:
    """Time a product in both dtypes."""
    generator = torch.Generator("cuda").manual_seed(inner)
    x_TD, weight_FD = (
        torch.randn(rows, inner, device="cuda", generator=generator).bfloat16() for rows in (TOKENS, columns)
    )
    x_cast, weight_cast = cast_rows(x_TD), cast_rows(weight_FD)
    bf16 = median_milliseconds(lambda: x_TD @ weight_FD.T)
    fp8 = median_milliseconds(lambda: product(x_cast, weight_cast))
    with_casts = median_milliseconds(partial(torch.compile(cast_and_multiply), x_TD, weight_FD))
    expected = [x_TD[:64].double() @ weight_FD.double().T]
    errors = [relative_error([out[:64]], expected) for out in (x_TD @ weight_FD.T, product(x_cast, weight_cast))]
    rate = 2 * TOKENS * inner * columns / 1e9
    is_right = errors[1] < LIMIT and fp8 < bf16
    cells = [f"{TOKENS:,} x {inner:,} x {columns:,}", f"{bf16:.2f}", f"{rate / bf16:,.0f}"]
    cells += [f"{fp8:.2f}", f"{rate / fp8:,.0f}", f"{bf16 / fp8:.2f}", f"{bf16 / with_casts:.2f}"]
    return [*cells, f"{errors[0]:.1e}", f"{errors[1]:.1e}", f"{LIMIT:g}", table.check(name, is_right)]


def cast_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` in fp8, and the scale of each row, [N, 1]."""
    scale = x.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def product(x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor]) -> Tensor:
    """Return x weight^T of two casts."""
    return torch._scaled_mm(
        x[0], weight[0].T, scale_a=x[1], scale_b=weight[1].T, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def cast_and_multiply(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    return product(cast_rows(x_TD), cast_rows(weight_FD))
