"""Keys and values of earlier tokens, so that each new token needs the forward pass of one token only.

A cache replaces the cores of attention, as layouts do, and the positions of tokens. Rows have prompts of different
lengths without padding on the left: padding on their right is later than all of their tokens, and new ones replace it.

Shapes: B rows, T new tokens, S cached tokens, H heads, K head width."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.attention import attend
from phalanx.model.transformer import Transformer

GROWTH_TOKENS = 128
"""Tokens by which the memory of a cache grows at least."""


class KeyValueCache:
    """The number of tokens that each row of a batch has, and the keys and values of each layer."""

    def __init__(self, model: Transformer, lengths_B: Tensor) -> None:
        """Create an empty cache. The first pass has prompts of these lengths, padded on the right."""
        self.model = model
        self.lengths_B = lengths_B
        self.is_filled = False
        """True after the pass of the prompts. Later passes have one token per row."""
        self.longest = int(lengths_B.max())
        self.is_ragged = bool((lengths_B != self.longest).any())
        self.cores = {mixer: CachedCore(mixer.core, self, getattr(mixer, "chunk", None)) for mixer in _mixers(model)}

    @contextmanager
    def extended(self) -> Iterator[None]:
        """Let a forward pass of the model read the cache, and add its tokens: the prompts, or one per row."""
        positions = self.model.local_positions
        self.model.local_positions = self._positions
        for mixer, core in self.cores.items():
            mixer.core = core
        try:
            yield
        finally:
            self.model.local_positions = positions
            for mixer, core in self.cores.items():
                mixer.core = core.core
        if self.is_filled:
            self.lengths_B = self.lengths_B + 1
            self.longest += 1
        self.is_filled = True

    def _positions(self, x_BT: Tensor) -> Tensor:
        """Return the positions of the tokens of a pass, [T] or [B, T]."""
        return self.lengths_B[:, None] if self.is_filled else torch.arange(x_BT.shape[1], device=x_BT.device)


class CachedCore:
    """Attention of new tokens to those in a cache, in place of the core of one layer."""

    def __init__(self, core: Callable[..., Tensor], cache: KeyValueCache, chunk: int | None) -> None:
        """Create an empty cache of a layer, which sees `chunk` tokens if it is not None."""
        self.core = core
        self.cache = cache
        self.chunk = chunk
        self.keys = self.values = torch.empty(0)
        """[B, H, S, K], with space for further tokens."""

    def __call__(self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, mask: Tensor | None, **dials: Any) -> Tensor:
        """Return the weighted mean of the values of the cache and of the new tokens, [B, T, H, K]."""
        if not self.cache.is_filled:
            self.keys, self.values = (x.transpose(1, 2).to(v_BTHK.dtype) for x in (k_BTHK, v_BTHK))
            return self.core(q_BTHK, k_BTHK, v_BTHK, mask, **dials)
        self._append(k_BTHK.transpose(1, 2), v_BTHK.transpose(1, 2))
        keys, values = (x[:, :, : self.cache.longest + 1] for x in (self.keys, self.values))
        return self._attend(q_BTHK.transpose(1, 2).to(values.dtype), keys, values, **dials).transpose(1, 2)

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
        window: int | None = None,
        sinks_H: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Return the attention of one query per row, as `model.attention.attend` defines it."""
        visible_BS = self._visible(window)
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

    def _visible(self, window: int | None) -> Tensor | None:
        """Return which cached tokens the new token of each row sees, [B, S]; None: all."""
        size = self.cache.longest + 1
        limit = min(window or size, self.chunk or size)
        if not self.cache.is_ragged and limit >= size:
            return None
        last_B1 = self.cache.lengths_B[:, None]
        place_S = torch.arange(size, device=last_B1.device)
        visible = place_S <= last_B1
        if window is not None:
            visible = visible & (place_S > last_B1 - window)
        if self.chunk is not None:
            visible = visible & (place_S >= last_B1 // self.chunk * self.chunk)
        return visible


def can_cache(model: object) -> bool:
    """Return whether all mixers of a model are attention with its own core, not a layout's, so that a cache fits."""
    if not isinstance(model, Transformer) or model.num_context_ranks > 1:
        return False
    blocks: list[Any] = list(model.blocks)
    # A compiled block would be compiled again for each token.
    if any(block._compiled_call_impl is not None for block in blocks):
        return False
    return all(mixer.core is attend for mixer in _mixers(model)) and not any(block.side_mixer for block in blocks)


def _mixers(model: Transformer) -> list[Any]:
    blocks: list[Any] = list(model.blocks)
    return [block.attention for block in blocks if block.attention is not None]
