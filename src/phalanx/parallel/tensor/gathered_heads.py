"""Tensor parallelism of attention whose number of heads the ranks do not divide.

Each rank has some columns of the queries, keys and values, possibly parts of heads. Queries and keys are gathered;
values stay on their rank. Compared with a pair of products (`autograd.py`), this adds a gather of both in the forward
pass, and a scatter of their gradients in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.part import Multiply, modules_declaring
from phalanx.model.products import TensorTuple
from phalanx.model.transformer import Transformer
from phalanx.parallel.tensor.tensor_parallel import TensorParallelGroup
from phalanx.spec.parts.operations import AttentionCore, Cut


def apply_gathered_heads(model: Transformer, tp: TensorParallelGroup) -> None:
    """Make attention work on columns of heads; `apply_tensor_parallel` has sharded its products."""
    for attention in modules_declaring(model, AttentionCore):
        (core,) = attention.part.cores
        columns = GatheredHeads(core.heads, tp)
        attention.multiply_columns = partial(_gather_products, attention.multiply_columns, columns)
        attention.core = partial(_attend_local_heads, attention.core, columns)


class GatheredHeads:
    """Attention where each rank has some columns of queries, keys and values instead of full heads.

    Queries and keys are gathered. The rank computes the heads that its columns of the values belong to, and returns
    only these columns."""

    def __init__(self, heads: Cut, tp: TensorParallelGroup) -> None:
        num_columns = heads.width // tp.size
        first_column = tp.rank * num_columns
        self.tp = tp
        self.heads = slice(first_column // heads.unit, -(-(first_column + num_columns) // heads.unit))
        self.padding = (
            first_column - self.heads.start * heads.unit,
            self.heads.stop * heads.unit - first_column - num_columns,
        )
        """Number of columns of these heads on other ranks, before and after this rank's."""


def _gather_products(multiply: Multiply, columns: GatheredHeads, x_BTD: Tensor, *layers: nn.Module) -> TensorTuple:
    q, k, v, *gate = multiply(x_BTD, *layers)
    q, k = cast(Tensor, _GatherColumns.apply(torch.stack([q, k]), columns.tp)).unbind()
    return q, k, F.pad(v, columns.padding), *gate


def _attend_local_heads(
    attend: Callable[..., Tensor],
    columns: GatheredHeads,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks_H: Tensor | None = None,
    **dials: Any,
) -> Tensor:
    sinks_H = None if sinks_H is None else sinks_H[columns.heads]
    out = attend(q[:, :, columns.heads], k[:, :, columns.heads], v, mask, sinks_H=sinks_H, **dials).flatten(2)
    before, after = columns.padding
    return out[..., before : out.shape[-1] - after].unsqueeze(2)


class _GatherColumns(torch.autograd.Function):
    """All-gather of columns; their gradients are reduced to the rank of each column."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallelGroup) -> Tensor:
        ctx.tp = tp
        return tp.start_all_gather(x, axis=x.ndim - 1)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.start_reduce_scatter(gradient, axis=gradient.ndim - 1)(), None
