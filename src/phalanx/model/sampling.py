"""Sampling from a language model, one token after another. Shapes: T tokens, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor

Model = Callable[[Tensor], tuple[Tensor, Tensor]]


def stream_tokens(
    model: Model,
    tokens_T: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
    context: int | None = None,
    vocab: int | None = None,
) -> Iterator[int]:
    """Endless next tokens after `tokens_T` (at least one); each costs one forward pass, when it is asked for.

    `model` gives logits [1, T, V] and an auxiliary loss, like Transformer.forward; it sees the last `context`
    tokens. `temperature` 0 takes the likeliest token; `top_k` 0 draws from all, and `vocab` from the first so many: a
    model may have more than its tokenizer. The draw is made where
    `generator` is, on the CPU without one.
    """
    device = torch.device("cpu") if generator is None else generator.device
    while True:
        seen_T = tokens_T if context is None else tokens_T[-context:]
        with torch.no_grad():
            logits_1TV, _ = model(seen_T[None])
        token = sample_token(logits_1TV[0, -1, :vocab].float().to(device), temperature, top_k, generator=generator)
        tokens_T = torch.cat((tokens_T, tokens_T.new_tensor([token])))
        yield token


def sample_token(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator | None) -> int:
    """A token from softmax(logits / temperature) over the `top_k` likeliest."""
    if temperature == 0:
        return int(logits_V.argmax())
    vocab = len(logits_V)
    top_logits_K, tokens_K = logits_V.topk(min(top_k or vocab, vocab))
    index = (top_logits_K / temperature).softmax(0).multinomial(1, generator=generator)
    return int(tokens_K[index])


def generate(
    model: Model,
    tokens_T: Tensor,
    count: int,
    temperature: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
    eos_id: int | None = None,
    context: int | None = None,
    vocab: int | None = None,
) -> Tensor:
    """`tokens_T` and `count` more, [T + count]; what would follow `eos_id` is `eos_id`.

    The other arguments are those of `stream_tokens`. Exactly `count` forward passes are made whatever is drawn, so that
    ranks which share a sharded model stay in step.
    """
    new_tokens = list(
        islice(
            stream_tokens(model, tokens_T, temperature, top_k=top_k, generator=generator, context=context, vocab=vocab),
            count,
        )
    )
    if eos_id in new_tokens:
        stop = new_tokens.index(eos_id)
        new_tokens[stop:] = [eos_id] * (count - stop)
    return torch.cat((tokens_T, tokens_T.new_tensor(new_tokens)))
