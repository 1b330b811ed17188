"""Drawing of the next token from the logits of a language model. Shapes: B rows, V vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How next tokens are drawn; the names are those of transformers' generation."""

    temperature: float = 1.0
    """Divisor of the logits; 0 takes the most likely token."""
    top_k: int = 0
    """Number of most likely tokens to draw from; 0: all."""
    top_p: float = 1.0
    """Smallest total probability of the most likely tokens to draw from (nucleus sampling, arXiv 1904.09751)."""
    min_p: float = 0.0
    """Least probability of a token, as a share of that of the most likely one (arXiv 2407.01082)."""
    repetition_penalty: float = 1.0
    """Divisor of the positive logits of earlier tokens, and factor of negative ones (CTRL, arXiv 1909.05858, 4.1)."""
    suppress_tokens: tuple[int, ...] = ()
    """Tokens that are never drawn."""


def sample_tokens(
    logits_BV: Tensor, sampling: Sampling, generator: torch.Generator | None = None, seen_BV: Tensor | None = None
) -> Tensor:
    """Return a token of each row, int64 [B], on the device of the generator (None: that of the logits).

    `seen_BV` are the tokens that a penalty of repetitions applies to."""
    if sampling.repetition_penalty != 1 and seen_BV is not None:
        penalty = sampling.repetition_penalty
        penalized = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
        logits_BV = torch.where(seen_BV, penalized, logits_BV)
    if generator is not None:
        logits_BV = logits_BV.to(generator.device)
    if sampling.suppress_tokens:
        logits_BV = logits_BV.index_fill(-1, logits_BV.new_tensor(sampling.suppress_tokens).long(), -math.inf)
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    vocab = logits_BV.shape[-1]
    top_BK, tokens_BK = (logits_BV.float() / sampling.temperature).topk(min(sampling.top_k or vocab, vocab))
    probabilities = top_BK.softmax(-1)
    # The most likely tokens come first, and the first is always kept.
    before = probabilities.cumsum(-1) - probabilities
    is_kept = (before < sampling.top_p) & (probabilities >= sampling.min_p * probabilities[:, :1])
    is_kept[:, 0] = True
    choice_B1 = (probabilities * is_kept).multinomial(1, generator=generator)
    return tokens_BK.gather(1, choice_B1)[:, 0]
