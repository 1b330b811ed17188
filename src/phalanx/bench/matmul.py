"""Benchmark of the matrix products and the attention of one rank of a layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from phalanx.bench.layer_shapes import AttentionShape, MatmulShape, attention_shapes, matmul_shapes
from phalanx.bench.timing import time_calls
from phalanx.model.attention import attend, attention_mask
from phalanx.model.dtypes import TORCH_DTYPES
from phalanx.model.sequence_context import Documents
from phalanx.parallel.block_attention import attention_backward, attention_with_lse
from phalanx.spec.resolved_run import ResolvedRun

Row = dict[str, Any]
Calls = dict[str, Callable[[], object]]


def benchmark_matmul(resolved: ResolvedRun, device: torch.device, iterations: int) -> list[Row]:
    """Return median seconds and FLOP/s of each product: forward, input gradients and weight gradients.

    Only this rank of all ranks of the layout computes here.
    """
    dtype = TORCH_DTYPES[resolved.run.training.precision]
    rows: list[Row] = []
    for product, (names, count) in matmul_shapes(resolved).items():
        row = {"layers": names, "count": count, **asdict(product), "flops": product.flops}
        rows.append(row | _time_passes(_make_matmul_calls(product, dtype, device), device, iterations))
    return rows


def _make_matmul_calls(
    product: MatmulShape, dtype: torch.dtype, device: torch.device
) -> dict[str, Callable[[], Tensor]]:
    batch = (product.batch,) if product.batch > 1 else ()
    make = partial(torch.randn, device=device, dtype=dtype)
    x = make(*batch, product.m, product.k)
    weight = make(*batch, product.n, product.k)
    gradient = make(*batch, product.m, product.n)
    return {"forward": lambda: x @ weight.mT, "inputs": lambda: gradient @ weight, "weights": lambda: gradient.mT @ x}


def benchmark_attention(resolved: ResolvedRun, device: torch.device, iterations: int) -> list[Row]:
    """Return median seconds of each part of attention, forward and backward, with the model's kernels.

    Only this rank of all ranks of the layout computes here.
    """
    dtype = TORCH_DTYPES[resolved.run.training.precision]
    rows: list[Row] = []
    for core, count in attention_shapes(resolved).items():
        calls = (_make_ring_calls if core.ring else _make_attention_calls)(core, dtype, device)
        row = {"count": count, **asdict(core), "flops": core.flops}
        rows.append(row | _time_passes(calls, device, iterations))
    return rows


def _make_attention_calls(core: AttentionShape, dtype: torch.dtype, device: torch.device) -> Calls:
    """Return the passes of a block's attention, with one row per document."""
    make = partial(torch.randn, device=device, dtype=dtype, requires_grad=True)
    q = make(core.batch, core.queries, core.heads, core.head_dim)
    k, v = (make(core.batch, core.keys, core.kv_heads, core.head_dim) for _ in range(2))
    documents = Documents.whole_rows(core.batch, core.queries, device)
    if core.chunk is not None:
        documents = documents.in_chunks(core.chunk)
    sinks = make(core.heads) if core.sinks else None
    dials = (core.window is not None, core.sinks, core.softcap is not None)
    mask = attention_mask(documents, dtype, core.head_dim, *dials) if core.masked or core.chunk else None
    forward = partial(attend, q, k, v, mask, core.window, sinks, core.softcap)
    out = forward()
    gradient = torch.ones_like(out)
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    return {"forward": forward, "backward": lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)}


def _make_ring_calls(core: AttentionShape, dtype: torch.dtype, device: torch.device) -> Calls:
    """Return the passes of a step of ring attention, with one row per document."""
    make = partial(torch.randn, device=device, dtype=dtype)
    q = make(core.batch, core.heads, core.queries, core.head_dim)
    k, v = (make(core.batch, core.kv_heads, core.keys, core.head_dim) for _ in range(2))
    out, lse = attention_with_lse(q, k, v, core.causal)
    gradient = torch.ones_like(out)
    return {
        "forward": lambda: attention_with_lse(q, k, v, core.causal),
        "backward": lambda: attention_backward(gradient, q, k, v, out, lse, core.causal),
    }


def _time_passes(calls: Mapping[str, Callable[[], object]], device: torch.device, iterations: int) -> dict[str, float]:
    return {f"{name}_seconds": median(time_calls(call, device, iterations)) for name, call in calls.items()}
