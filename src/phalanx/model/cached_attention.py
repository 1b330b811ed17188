"""Attention of new tokens to the keys and values of earlier ones.

Shapes: B rows, T new tokens, S cached tokens, H heads, K head width."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from phalanx.model.token_cache import TokenCache

GROWTH_TOKENS = 128
"""Tokens by which the memory of a cache grows at least."""


class CachedAttention:
    """Attention of new tokens to those in a cache, in place of the core of one layer."""

    def __init__(self, mixer: Any, cache: TokenCache) -> None:
        """Create the empty cache of a layer."""
        self.core = mixer.core
        self.cache = cache
        self.chunk: int | None = getattr(mixer, "chunk", None)
        self.keys = self.values = torch.empty(0)
        """[B, H, S, K], with space for further tokens."""

    def __call__(self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, mask: Tensor | None, **dials: Any) -> Tensor:
        """Return the weighted mean of the values of the cache and of the new tokens, [B, T, H, K]."""
        if not self.cache.is_filled:
            self.keys, self.values = (x.transpose(1, 2).to(v_BTHK.dtype) for x in (k_BTHK, v_BTHK))
            return self.core(q_BTHK, k_BTHK, v_BTHK, mask, **dials)
        self._append(k_BTHK.transpose(1, 2), v_BTHK.transpose(1, 2))
        tokens, visible_BS = self._visible(dials.pop("window", None))
        keys, values = (x[:, :, tokens] for x in (self.keys, self.values))
        return self._attend(q_BTHK.transpose(1, 2).to(values.dtype), keys, values, visible_BS, **dials).transpose(1, 2)

    def _append(self, k_BH1K: Tensor, v_BH1K: Tensor) -> None:
        """Write the keys and values of one token per row after those of the row."""
        if self.cache.longest >= self.keys.shape[2]:
            space = max(GROWTH_TOKENS, self.keys.shape[2] // 2)
            self.keys, self.values = (F.pad(x, (0, 0, 0, space)) for x in (self.keys, self.values))
        if not self.cache.is_ragged:
            place = slice(self.cache.longest, self.cache.longest + 1)
            self.keys[:, :, place] = k_BH1K.to(self.keys.dtype)
            self.values[:, :, place] = v_BH1K
            return
        rows = torch.arange(len(self.keys), device=self.keys.device)
        self.keys[rows, :, self.cache.lengths_B] = k_BH1K[:, :, 0].to(self.keys.dtype)
        self.values[rows, :, self.cache.lengths_B] = v_BH1K[:, :, 0]

    def _attend(
        self,
        q_BH1K: Tensor,
        k_BHSK: Tensor,
        v_BHSK: Tensor,
        visible_BS: Tensor | None,
        sinks_H: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Return the attention of one query per row, as `model.attention.attend` defines it."""
        mask = None if visible_BS is None else visible_BS[:, None, None]
        # The G queries of a group of heads have the same keys, as several tokens of one head would.
        q_BHGK = q_BH1K.unflatten(1, (k_BHSK.shape[1], -1)).squeeze(3)
        if sinks_H is None and softcap is None:
            out_BHGK = F.scaled_dot_product_attention(q_BHGK, k_BHSK, v_BHSK, attn_mask=mask)
            return out_BHGK.flatten(1, 2).unsqueeze(2)
        scores = q_BHGK @ k_BHSK.transpose(2, 3) / math.sqrt(q_BHGK.shape[-1])
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        if sinks_H is not None:
            sinks = sinks_H.to(scores.dtype).view(*q_BHGK.shape[1:3], 1).expand(len(scores), -1, -1, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(-1)[..., : v_BHSK.shape[2]]
        return (weights @ v_BHSK).flatten(1, 2).unsqueeze(2)

    def _visible(self, window: int | None) -> tuple[slice, Tensor | None]:
        """Return the cached tokens that new ones may see, and which that of each row sees, [B, S]; None: all."""
        size = self.cache.longest + 1
        if not self.cache.is_ragged:
            first = 0 if self.chunk is None else (size - 1) // self.chunk * self.chunk
            return slice(max(first, 0 if window is None else size - window), size), None
        last_B1 = self.cache.lengths_B[:, None]
        place_S = torch.arange(size, device=last_B1.device)
        visible = place_S <= last_B1
        if window is not None:
            visible = visible & (place_S > last_B1 - window)
        if self.chunk is not None:
            visible = visible & (place_S >= last_B1 // self.chunk * self.chunk)
        return slice(0, size), visible
