"""Convolution of each channel over earlier tokens of the same document.

Shapes: B batch, T tokens, C channels, S taps."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_convolution(x_BTC: Tensor, taps_CS: Tensor, bias_C: Tensor | None, starts_BT: Tensor | None) -> Tensor:
    """Return for each channel the sum of the last S tokens of its document times taps, [B, T, C].

    The last tap is the current token's, as in PyTorch's Conv1d."""
    out_BTC = x_BTC * taps_CS[:, -1]
    if bias_C is not None:
        out_BTC += bias_C
    for lag in range(1, min(taps_CS.shape[1], x_BTC.shape[1])):
        out_BTC[:, lag:].addcmul_(
            _hide_documents(x_BTC[:, :-lag], lag, starts_BT), taps_CS[:, -1 - lag].to(x_BTC.dtype)
        )
    return out_BTC


def causal_convolution_backward(
    gradient_BTC: Tensor, x_BTC: Tensor, taps_CS: Tensor, starts_BT: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the taps (`causal_convolution`)."""
    grad_x_BTC = gradient_BTC * taps_CS[:, -1]
    grad_taps = torch.zeros_like(taps_CS)
    grad_taps[:, -1] = (gradient_BTC * x_BTC).sum((0, 1))
    for lag in range(1, min(taps_CS.shape[1], x_BTC.shape[1])):
        visible = _hide_documents(gradient_BTC[:, lag:], lag, starts_BT)
        grad_x_BTC[:, :-lag].addcmul_(visible, taps_CS[:, -1 - lag].to(gradient_BTC.dtype))
        grad_taps[:, -1 - lag] = (visible * x_BTC[:, :-lag]).sum((0, 1))
    return grad_x_BTC, grad_taps


def _hide_documents(x: Tensor, lag: int, starts_BT: Tensor | None) -> Tensor:
    """Return the values of pairs of tokens with a distance of `lag`, 0 where they are of two documents."""
    if starts_BT is None:
        return x
    later_T = torch.arange(lag, starts_BT.shape[1], device=x.device)
    return x * (later_T - lag >= starts_BT[:, lag:])[..., None]
