"""Causal attention from all scores in fp64, with documents, windows, sinks and caps, and cases to compare with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.model.attention import document_mask
from tests.helpers.batches import starts_of_lengths

LENGTHS: dict[str, list[list[int]]] = {
    "whole": [[192]],
    "ones": [[1] * 70],
    "mixed": [[1, 150, 41], [191, 1]],
    "long": [[320], [300, 20]],
    "one beyond a window": [[65, 131, 6, 134]],
}
WINDOWS = (None, 1, 5, 64, 130, 1000)
HEADS = {"equal": (4, 4), "grouped": (6, 2)}


class AttentionCase(NamedTuple):
    """Documents, window, heads, sinks and cap of a comparison."""

    lengths: str
    window: int | None
    heads: str
    sinks: bool
    softcap: float | None = None

    @property
    def starts(self) -> Tensor:
        """Start of each token's document, [B, T]."""
        return starts_of_lengths(LENGTHS[self.lengths]).int()

    def operands(self) -> list[Tensor]:
        """Return the gradient of the output, queries, keys, values and sinks, if any, in fp64."""
        torch.manual_seed(0)
        query_heads, kv_heads = HEADS[self.heads]
        counts = (query_heads, query_heads, kv_heads, kv_heads)
        tensors = [torch.randn(*self.starts.shape, count, 10, dtype=torch.float64) for count in counts]
        return tensors + ([torch.randn(query_heads, dtype=torch.float64)] if self.sinks else [])


CASES = [
    AttentionCase(lengths, window, heads, sinks)
    for lengths, window, (heads, sinks) in product(LENGTHS, WINDOWS, [("equal", False), ("grouped", True)])
]
CAPPED_CASES = [case._replace(softcap=1.5) for case in CASES]


def attend_to_all_scores(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, window: int | None, sinks: Tensor | None, softcap: float | None
) -> Tensor:
    """Return attention, [B, T, H, K], from its T x T scores and a softmax with a column for the sink."""
    tokens, heads = q.shape[1:3]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    visible = document_mask(starts)
    if window is not None:
        visible = visible & ~torch.ones(tokens, tokens, dtype=torch.bool).tril(-window)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., :tokens] @ v).transpose(1, 2)


def compute(attend: Callable[..., Tensor], case: AttentionCase, dtype: torch.dtype = torch.float64) -> Sequence[Tensor]:
    """Return the output and the gradients of queries, keys, values and sinks.

    Args:
        attend: Function of q, k, v, the starts of documents, the window, the sinks and the cap.
        case: Operands.
        dtype: Dtype of the operands.
    """
    gradient, *operands = (x.to(dtype) for x in case.operands())
    leaves = [x.requires_grad_() for x in operands]
    sinks = leaves[3] if case.sinks else None
    out = attend(*leaves[:3], case.starts, case.window, sinks, case.softcap)
    return out.detach(), *torch.autograd.grad(out, leaves, gradient)


@cache
def compute_from_all_scores(case: AttentionCase) -> Sequence[Tensor]:
    """Return the output and the gradients of `attend_to_all_scores` in fp64, for comparisons in several dtypes."""
    return compute(attend_to_all_scores, case)


def max_relative_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the maximum over tensors of the error's norm, relative to that of the tensor or of 1 per row."""
    return max(
        float((x.double() - y).norm() / max(y.norm(), y.numel() ** 0.5)) for x, y in zip(actual, expected, strict=True)
    )
