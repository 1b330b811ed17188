"""Sampling from a language model, one token after another. Shapes: B rows, T tokens, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor

Model = Callable[[Tensor], tuple[Tensor, Tensor]]


def sample(
    model: Model,
    tokens_BT: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
    context: int | None = None,
) -> Iterator[Tensor]:
    """Endless next tokens, [B] each, after `tokens_BT`; a forward pass is made for each when it is asked for.

    `model` gives logits [B, T, V] and an auxiliary loss, like Transformer.forward. `temperature` 0 takes the
    likeliest token; `top_k` 0 draws from all. `generator` is on the CPU, where the draw is made, so that
    devices agree. The model sees the last `context` tokens.
    """
    while True:
        seen_BT = tokens_BT if context is None else tokens_BT[:, -context:]
        with torch.no_grad():
            logits_BTV, _ = model(seen_BT)
        drawn_B = draw(logits_BTV[:, -1].float().cpu(), temperature, top_k, generator)
        tokens_BT = torch.cat((tokens_BT, drawn_B[:, None].to(tokens_BT.device)), dim=1)
        yield drawn_B


def draw(logits_BV: Tensor, temperature: float, top_k: int, generator: torch.Generator | None) -> Tensor:
    """A token for each row, [B]: from softmax(logits / temperature) over the `top_k` likeliest."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    kept_BK, tokens_BK = logits_BV.topk(min(top_k or logits_BV.shape[-1], logits_BV.shape[-1]))
    place_B1 = (kept_BK / temperature).softmax(-1).multinomial(1, generator=generator)
    return tokens_BK.gather(-1, place_B1)[:, 0]


def generate(
    model: Model,
    tokens_BT: Tensor,
    count: int,
    temperature: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
    end: int | None = None,
    context: int | None = None,
) -> Tensor:
    """`tokens_BT` and `count` more, [B, T + count]; what a row would say after `end` is replaced by `end`.

    The other arguments are `sample`'s. Exactly `count` forward passes are made whatever is drawn, so that
    ranks which share a sharded model stay in step.
    """
    new_BN = torch.stack(
        list(islice(sample(model, tokens_BT, temperature, top_k, generator, context), count)), dim=1
    )
    if end is not None:
        ended = (new_BN == end).cumsum(1) > 0
        new_BN = new_BN.masked_fill(ended, end)
    return torch.cat((tokens_BT, new_BN.to(tokens_BT.device)), dim=1)
