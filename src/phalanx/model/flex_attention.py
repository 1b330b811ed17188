"""Causal attention by FlexAttention (arXiv 2412.05496), where CUDA has no flash kernel for windows, caps and sinks.

Shapes: B batch, T tokens, H heads, K head width."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention


def attend_with_flex(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHK: Tensor,
    starts_BT: Tensor | None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return causal attention, [B, T, H, K]; arguments as in `attend`.

    `starts_BT` is the start of each token's document in its row; None if every row is one document."""

    def is_visible(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = key <= query
        if window is not None:
            visible = visible & (key > query - window)
        return visible if starts_BT is None else visible & (key >= starts_BT[row, query])

    def cap(score: Tensor, *_: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    # Triton has no products in fp64.
    compiled = q_BTHK.device.type == "cuda" and q_BTHK.dtype != torch.float64
    rows = None if starts_BT is None else len(q_BTHK)
    tokens = q_BTHK.shape[1]
    mask = create_block_mask(is_visible, rows, None, tokens, tokens, device=q_BTHK.device, _compile=compiled)
    out, auxiliary = _select_flex_attention(compiled)(
        *(x.transpose(1, 2) for x in (q_BTHK, k_BTHK, v_BTHK)),
        score_mod=None if softcap is None else cap,
        block_mask=mask,
        enable_gqa=q_BTHK.shape[2] != k_BTHK.shape[2],
        return_aux=AuxRequest(lse=True),
    )
    if sinks_H is not None:
        weight = torch.sigmoid(auxiliary.lse - sinks_H[:, None].to(auxiliary.lse.dtype))
        out = out * weight[..., None].to(out.dtype)
    return out.transpose(1, 2)


@cache
def _select_flex_attention(compiled: bool) -> Callable[..., Any]:
    return cast(Callable[..., Any], torch.compile(flex_attention) if compiled else flex_attention)
