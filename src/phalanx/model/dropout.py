"""Dropout of the input of an adapter (arXiv 1207.0580), with the same mask in every layout.

A number is dropped by a hash of its token, its product and its column, as in counter-based generators (Salmon et al.,
2011, "Parallel random numbers: as easy as 1, 2, 3"). So ranks need not draw the numbers of others, a mask is computed
again instead of saved, and CPU and GPU drop the same numbers. The hash is lowbias32 of
https://github.com/skeeto/hash-prospector.

Shapes: B batch, T tokens, I columns."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, noop_context_fn

from phalanx.model.chunks import rows_at_once

Drop = Callable[[Tensor], Tensor]
"""Function of values [..., I]; returns them with some set to zero, and the others divided by the share of these."""

_token_keys: ContextVar[Tensor | None] = ContextVar("token_keys", default=None)


def token_keys(seed: int, step: int, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the keys of the tokens at some positions in rows of a step's global batch, int32 [B, T]."""
    seed_key = _mix(torch.tensor(_signed(seed), dtype=torch.int32))
    row_keys = _mix(_mix(seed_key ^ step) ^ torch.from_numpy(rows).int())
    return _mix(row_keys[:, None] ^ torch.from_numpy(positions).int()).numpy()


def product_key(name: str) -> int:
    """Return the key of a product of the model, by its name; an int32."""
    return _signed(zlib.crc32(name.encode()))


@contextmanager
def dropping(keys_BT: Tensor | None) -> Iterator[None]:
    """Drop inputs of adapters in the forward passes of a micro-batch, by the keys of its tokens; None: drop nothing."""
    token = _token_keys.set(keys_BT)
    try:
        yield
    finally:
        _token_keys.reset(token)


def checkpoint_dropping_alike(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function and drop its activations; backward recomputes them, with the same inputs of adapters dropped."""
    keys = _token_keys.get()
    contexts = noop_context_fn if keys is None else lambda: (nullcontext(), dropping(keys))
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)


@dataclass
class Dropout:
    """Dropout of the numbers that a product reads."""

    rate: float
    key: int = 0
    """Key of the product, by which others drop other numbers (`product_key`)."""
    first_column: int = 0
    """First column of this rank, if ranks share the product by columns."""
    rank: int = 0
    """Rank among those that share the tokens of the residual stream."""

    def of_tokens(self, x: Tensor) -> Drop | None:
        """Return the dropout of values of the tokens of `x`, [..., I]; None if nothing is dropped now."""
        keys = _token_keys.get()
        if keys is None:
            return None
        tokens = x.shape[:-1].numel()
        if tokens < keys.numel():  # the residual stream's tokens of this rank
            keys = keys.chunk(keys.numel() // tokens, dim=1)[self.rank]
        return partial(self._drop, keys.flatten())

    def _drop(self, rows: Tensor, x: Tensor) -> Tensor:
        """Return `x` [..., I] without what is dropped; the rest is divided by the share that is kept."""
        out = torch.empty_like(x)
        columns = torch.arange(self.first_column, self.first_column + x.shape[-1], dtype=torch.int32, device=x.device)
        columns = _mix(columns ^ self.key)
        threshold = _signed(round(self.rate * 2**32) - 2**31)
        for out_part, x_part, keys in rows_at_once(out, x, rows.view(*x.shape[:-1], 1)):
            is_dropped = _mix(keys ^ columns) < threshold
            out_part.copy_(x_part.masked_fill(is_dropped, 0).div_(1 - self.rate))
        return out


def _mix(x: Tensor) -> Tensor:
    """Return a hash of each number, int32, in the memory of the argument."""
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    return x


def _signed(number: int) -> int:
    """Return the int32 with the bits of an unsigned number."""
    return (number + 2**31) % 2**32 - 2**31
