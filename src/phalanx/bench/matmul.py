"""Time the matrix products and the attention of one rank of a layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.bench.layer_shapes import AttentionShape, MatmulShape, attention_shapes, matmul_shapes
from phalanx.bench.timing import time_calls
from phalanx.model.dtypes import TORCH_DTYPES
from phalanx.spec.run import RunSpec

Row = dict[str, Any]


def benchmark_matmul(run: RunSpec, world_size: int, device: torch.device, iterations: int) -> list[Row]:
    """Of each product median seconds and FLOP/s: forward, and of the gradients of its inputs and of its weights."""
    dtype = TORCH_DTYPES[run.training.precision]
    rows: list[Row] = []
    for product, (names, count) in matmul_shapes(run, world_size).items():
        row = {"layers": names, "count": count, **asdict(product), "flops": product.flops}
        pass_seconds = _time_passes(_matmul_calls(product, dtype, device), device, iterations)
        rows.append(row | {f"{pass_name}_seconds": seconds for pass_name, seconds in pass_seconds.items()})
    return rows


def _matmul_calls(product: MatmulShape, dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    batch = (product.batch,) if product.batch > 1 else ()
    make = partial(torch.randn, device=device, dtype=dtype)
    x, weight = make(*batch, product.m, product.k), make(*batch, product.n, product.k)
    gradient = make(*batch, product.m, product.n)
    return {
        "forward": lambda: x @ weight.mT,
        "inputs": lambda: gradient @ weight,
        "weights": lambda: gradient.mT @ x,
    }


def benchmark_attention(run: RunSpec, world_size: int, device: torch.device, iterations: int) -> list[Row]:
    """Of each part of attention median seconds, forward and backward."""
    dtype = TORCH_DTYPES[run.training.precision]
    rows: list[Row] = []
    for core, count in attention_shapes(run, world_size).items():
        pass_seconds = _time_passes(_attention_calls(core, dtype, device), device, iterations)
        row = {"count": count, **asdict(core), "flops": core.flops}
        rows.append(row | {f"{pass_name}_seconds": seconds for pass_name, seconds in pass_seconds.items()})
    return rows


def _attention_calls(core: AttentionShape, dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], object]]:
    make = partial(torch.randn, device=device, dtype=dtype, requires_grad=True)
    q = make(core.batch, core.heads, core.queries, core.head_dim)
    k, v = (make(core.batch, core.kv_heads, core.keys, core.head_dim) for _ in range(2))
    mask = torch.ones(core.queries, core.keys, dtype=torch.bool, device=device) if core.masked else None
    mask = mask.tril() if mask is not None and core.causal else mask
    repeats = core.heads // core.kv_heads if mask is not None and device.type != "cpu" else 1  # as the model does

    def forward() -> Tensor:
        keys, values = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (k, v))
        return F.scaled_dot_product_attention(
            q,
            keys,
            values,
            attn_mask=mask,
            is_causal=core.causal and mask is None,
            enable_gqa=core.heads > keys.shape[1],
        )

    out = forward()
    gradient = torch.ones_like(out)
    return {"forward": forward, "backward": lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)}


def _time_passes(
    calls: dict[str, Callable[[], Tensor]] | dict[str, Callable[[], object]], device: torch.device, iterations: int
) -> dict[str, float]:
    return {pass_name: median(time_calls(call, device, iterations)) for pass_name, call in calls.items()}
