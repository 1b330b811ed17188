"""How many floating-point operations a step really asks for."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
MATMUL_OPS = {"mm": aten.mm, "addmm": aten.addmm, "bmm": aten.bmm, "baddbmm": aten.baddbmm}
"""Also of those that write in place, whose names end with an underscore."""
ATTENTION_PREFIX = "_scaled_dot_product_"


class FlopCounter(TorchDispatchMode):
    """Adds up matrix products and attention, as `cost.exact.flops` counts them: the two products of attention twice as
    often backward as forward, and of causal attention half of each; the scores that kernels compute again are not
    counted. (PyTorch's own counter knows neither causality, nor the CPU's kernels, nor grouped products.)"""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__ if func.namespace == "aten" else ""
        if (product := MATMUL_OPS.get(name.rstrip("_"))) is not None:
            self.flops += flop_registry[product](*args, **(kwargs or {}), out_val=out)
        elif name == "_grouped_mm":
            self.flops += _grouped_mm_flops(args[0], out)
        elif name.startswith(ATTENTION_PREFIX):
            names = [argument.name for argument in func._schema.arguments]
            bound_args = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            backward = name.endswith("_backward")
            self.flops += _attention_flops(
                bound_args["query"], bound_args["key"], bound_args.get("is_causal", False), backward=backward
            )
        return out


def _grouped_mm_flops(first: Tensor, out: Tensor) -> int:
    """Of rows [N, I] times [E, I, O], and of columns [O, N] times rows [N, I], which give [E, O, I]: every number of
    the first meets as many as the result is wide."""
    return 2 * prod(first.shape) * out.shape[-1]


def _attention_flops(query: Tensor, key: Tensor, causal: bool, backward: bool) -> int:
    batch, heads, queries, width = query.shape
    products = 2 * 2 * batch * heads * queries * key.shape[2] * width
    return products * (2 if backward else 1) // (2 if causal else 1)
