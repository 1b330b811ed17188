"""State that layers keep of earlier tokens, so that each new token needs the forward pass of one token only.

A cache replaces the cores of mixers, as layouts do, and the positions of tokens. Ranks that share a model each keep
what their heads and blocks need. Rows have prompts of different lengths without padding on the left: padding on their
right is later than all of their tokens, and new ones replace it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.model.attention import attend
from phalanx.model.cached_attention import CachedAttention
from phalanx.model.mixers.cached_scans import CachedConvolution, CachedDelta, CachedMamba2
from phalanx.model.mixers.gated_delta import gated_delta
from phalanx.model.mixers.mamba2 import scan
from phalanx.model.mixers.short_convolution import convolve_gated
from phalanx.model.part import modules_declaring
from phalanx.model.transformer import Transformer
from phalanx.spec.layers import check_sequence
from phalanx.spec.parts.operations import Core

CACHED_CORES: dict[Callable[..., Tensor], Callable[..., Any]] = {
    attend: CachedAttention,
    gated_delta: CachedDelta,
    scan: CachedMamba2,
    convolve_gated: CachedConvolution,
}
"""Replacement of each core."""


class TokenCache:
    """The number of tokens that each row of a batch has, and what each layer keeps of them."""

    def __init__(self, model: Transformer, lengths_B: Tensor) -> None:
        """Create an empty cache. The first pass has prompts of these lengths, padded on the right."""
        self.model = model
        self.lengths_B = lengths_B
        self.is_filled = False
        """True after the pass of the prompts. Later passes have one token per row."""
        self.longest = int(lengths_B.max())
        self.is_ragged = bool((lengths_B != self.longest).any())
        self.cores = {mixer: CACHED_CORES[_kernel(mixer)](mixer, self) for mixer in modules_declaring(model, Core)}

    @property
    def last_tokens(self) -> Tensor:
        """Index of the last token of each row in the next pass, [B]."""
        return torch.zeros_like(self.lengths_B) if self.is_filled else self.lengths_B - 1

    @contextmanager
    def extended(self) -> Iterator[None]:
        """Let a forward pass of the model read the cache, and add its tokens: the prompts, or one per row.

        Raises UserError for more tokens than mixers compute."""
        check_sequence(self.model.spec, "tokens", self.longest + self.is_filled)
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


def can_cache(model: Transformer) -> bool:
    """Return whether all mixers of a model have their own cores, not those of a layout, so that a cache fits."""
    if model.num_context_ranks > 1:
        return False
    # A compiled block would be compiled again for each token.
    if any(module._compiled_call_impl is not None for module in model.modules()):
        return False
    return all(_kernel(mixer) in CACHED_CORES for mixer in modules_declaring(model, Core))


def _kernel(mixer: Any) -> Callable[..., Tensor]:
    """Return the function that computes the core of a mixer."""
    kernel: Callable[..., Tensor] = mixer.core.func if isinstance(mixer.core, partial) else mixer.core
    return kernel
