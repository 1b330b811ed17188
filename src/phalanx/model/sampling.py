"""Sampling from a language model, one token at a time. Shapes: T tokens, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor

Model = Callable[[Tensor], Tensor | tuple[Tensor, Tensor]]


def stream_tokens(
    model: Model,
    tokens_T: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
    context: int | None = None,
    vocab: int | None = None,
) -> Iterator[int]:
    """Yield an endless stream of next tokens, with one forward pass per requested token.

    Arguments are those of `generate`; the model may also return logits alone."""
    device = torch.device("cpu") if generator is None else generator.device
    while True:
        seen_T = tokens_T if context is None else tokens_T[-context:]
        with torch.no_grad():
            output = model(seen_T[None])
            logits_1TV = output[0] if isinstance(output, tuple) else output
        token = sample_token(logits_1TV[0, -1, :vocab].float().to(device), temperature, top_k, generator)
        tokens_T = torch.cat((tokens_T, tokens_T.new_tensor([token])))
        yield token


def sample_token(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator | None) -> int:
    """Return a token sampled from softmax(logits / temperature) over the `top_k` most likely tokens.

    Temperature 0 takes the most likely token, `top_k` 0 samples from all. None is torch's default generator."""
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
    """Sample tokens from a language model.

    Exactly `count` forward passes are made whatever is drawn, so that the ranks of a sharded model stay in step.

    Args:
        model: Returns logits [1, T, V] and an auxiliary loss for token ids [1, T].
        tokens_T: The ids of the prompt, at least one.
        count: The number of tokens to add.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Draw from this number of most likely tokens; 0 draws from all.
        generator: The generator of the draw, which is made on its device. By default PyTorch's own, on the CPU.
        eos_id: The id that ends a text. Later tokens are `eos_id` too.
        context: The number of last tokens that the model sees. By default all.
        vocab: Draw from the first `vocab` ids only: a model may have more than its tokenizer.

    Returns:
        The ids of the prompt and of the new tokens, [T + count].

    Example:
        >>> model, tokenizer = phalanx.load_model("runs/first")
        >>> prompt = torch.tensor(tokenizer.encode_batch(["def "])[0])
        >>> ids = phalanx.generate(model, prompt, 5, temperature=0.8, top_k=50, vocab=tokenizer.vocab)
        >>> len(ids) - len(prompt), tokenizer.decode(ids[: len(prompt)].tolist())
        (5, 'def ')"""
    new_tokens = list(islice(stream_tokens(model, tokens_T, temperature, top_k, generator, context, vocab), count))
    if eos_id in new_tokens:
        stop = new_tokens.index(eos_id)
        new_tokens[stop:] = [eos_id] * (count - stop)
    return torch.cat((tokens_T, tokens_T.new_tensor(new_tokens)))
