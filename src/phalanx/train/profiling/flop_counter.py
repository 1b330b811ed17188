"""Counter of the floating-point operations of a step."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from phalanx.model.uncounted_products import is_uncounted

aten = torch.ops.aten
MATMUL_OPS = {
    "mm": aten.mm,
    "addmm": aten.addmm,
    "bmm": aten.bmm,
    "baddbmm": aten.baddbmm,
    "_scaled_mm": aten._scaled_mm,
}
"""Matrix products; in-place variants have the same name and a final underscore."""
GROUPED_MATMUL_OPS = ("_grouped_mm", "_scaled_grouped_mm")
ATTENTION_PREFIX = "_scaled_dot_product_"


class FlopCounter(TorchDispatchMode):
    """Counter of the FLOPs of matrix products and attention, with the rules of `cost.exact.flops`.

    The two products of attention count twice in backward, and half with a causal mask. Blocks of a sliding window
    (`model.cpu_attention`) count the visible pairs. Products in `model.uncounted_products` are not
    counted. (PyTorch's own counter supports neither causality, nor the CPU's kernels, nor grouped products.)"""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_counted = func.namespace in ("aten", "phalanx") and not is_uncounted()
        name = func._overloadpacket.__name__ if is_counted else ""
        if (product := MATMUL_OPS.get(name.rstrip("_"))) is not None:
            self.flops += flop_registry[product](*args, **(kwargs or {}), out_val=out)
        elif name in GROUPED_MATMUL_OPS:
            # Rows [N, I] times [E, I, O] give [N, O], and columns [O, N] times rows [N, I] give [E, O, I]. In both
            # cases every element of the first operand is multiplied once per column of the result.
            self.flops += 2 * prod(args[0].shape) * out.shape[-1]
        elif name.startswith(ATTENTION_PREFIX):
            names = [argument.name for argument in func._schema.arguments]
            bound = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            query = bound["query"]
            pairs = _attended_pairs(query, bound["key"], bound.get("is_causal", False), bound.get("attn_mask"))
            num_products = 4 if name.endswith("_backward") else 2
            self.flops += int(2 * num_products * query.shape[0] * query.shape[1] * query.shape[3] * pairs)
        return out


def _attended_pairs(query: Tensor, key: Tensor, causal: bool, mask: Tensor | None) -> float:
    """Return the number of pairs of a head's queries and keys, without the upper triangle and those beyond a window."""
    queries = query.shape[2]
    keys = key.shape[2]
    if mask is not None and mask.ndim == 2 and keys >= queries:
        return queries * (keys - queries + 1)
    return queries * keys / (2 if causal else 1)
