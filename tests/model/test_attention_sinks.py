"""Sinks on CUDA's flash kernels: the arguments and gradients, with kernels of a CPU in their place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.model import attention_sinks
from phalanx.model.attention_sinks import attend_varlen_with_sinks
from tests.helpers.batches import locate_documents
from tests.helpers.reference_attention import CASES, compute, compute_from_all_scores, max_relative_error


def scores_of_packed(q: Tensor, k: Tensor, bounds: Tensor, window: int) -> Tensor:
    """Return the visible scores of packed tokens, [H, N, N]."""
    q, k = q.transpose(0, 1), k.transpose(0, 1)
    k = k.repeat_interleave(len(q) // len(k), dim=0)
    index = torch.arange(q.shape[1])
    document = torch.bucketize(index, bounds, right=True)
    distance = index[:, None] - index
    visible = (distance >= 0) & (document[:, None] == document)
    if window >= 0:
        visible &= distance <= window
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)


def flash_forward(*operands: Any, window_size_left: int, window_size_right: int) -> tuple[Tensor, ...]:
    """Stand for `aten::_flash_attention_forward`."""
    q, k, v, bounds, _, row, _, dropout, causal, debug = operands
    assert (window_size_right, dropout, causal, debug) == (0, 0.0, window_size_left < 0, False)
    assert row >= bounds.diff().max()
    scores = scores_of_packed(q, k, bounds, window_size_left)
    v = v.transpose(0, 1).repeat_interleave(len(scores) // v.shape[1], dim=0)
    out = (scores.softmax(-1) @ v).transpose(0, 1).contiguous()
    return out, scores.logsumexp(-1), torch.zeros(2), torch.zeros(0), torch.zeros(0)


def flash_backward(*operands: Any, window_size_left: int, window_size_right: int) -> list[Tensor]:
    """Stand for `aten::_flash_attention_backward`, which takes the weights from the log-sum-exp (algorithm 2)."""
    gradient, q, k, v, out, lse, bounds, _, _, _, dropout, causal, _, _ = operands
    assert (window_size_right, dropout, causal) == (0, 0.0, window_size_left < 0)
    weights = (scores_of_packed(q, k, bounds, window_size_left) - lse[..., None]).exp()
    repeats = len(weights) // v.shape[1]
    gradient, out, queries = (x.transpose(0, 1) for x in (gradient, out, q))
    keys, values = (x.transpose(0, 1).repeat_interleave(repeats, dim=0) for x in (k, v))
    row_sums = (gradient * out).sum(-1, keepdim=True)
    grad_scores = weights * (gradient @ values.mT - row_sums) / q.shape[-1] ** 0.5
    grad_kv = (x.unflatten(0, (-1, repeats)).sum(1) for x in (grad_scores.mT @ queries, weights.mT @ gradient))
    return [x.transpose(0, 1) for x in (grad_scores @ keys, *grad_kv)]


def test_varlen_with_sinks_equals_all_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_sinks, "FLASH_FORWARD", flash_forward)
    monkeypatch.setattr(attention_sinks, "FLASH_BACKWARD", flash_backward)

    def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, window: int | None, sinks: Tensor, _: None) -> Tensor:
        packed = [x.flatten(0, 1) for x in (q, k, v)]
        bounds = locate_documents(starts).bounds
        earlier_keys = -1 if window is None else window - 1
        return attend_varlen_with_sinks(*packed, sinks, bounds, starts.shape[1], earlier_keys).view_as(q)

    for case in CASES:
        if case.sinks:
            error = max_relative_error(compute(attend, case), compute_from_all_scores(case))
            assert error < 1e-14, case
