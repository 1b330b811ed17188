"""Generation of text by a language model. Shapes: B rows, T tokens, D width, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor

from phalanx.model.key_value_cache import KeyValueCache, can_cache
from phalanx.model.sampling import Sampling, sample_tokens
from phalanx.model.transformer import Transformer, cap_logits

Model = Callable[[Tensor], Tensor | tuple[Tensor, Tensor]]


def stream_tokens(
    model: Model,
    prompts: Sequence[Tensor],
    sampling: Sampling,
    generator: torch.Generator | None = None,
    context: int | None = None,
    vocab: int | None = None,
) -> Iterator[Tensor]:
    """Yield an endless stream of next tokens of all prompts, int64 [B] each, with one forward pass per yield.

    `prompts` are ids [T], at least one each. The model sees the last `context` tokens, by default all, and draws from
    the first `vocab` ids. With attention only, and up to `context` tokens, earlier keys and values are cached."""
    rows = [prompt.long() for prompt in prompts]
    seen = None
    for logits_BV in _stream_logits(model, rows, context):
        logits_BV = logits_BV[:, :vocab]
        if sampling.repetition_penalty != 1 and seen is None:
            seen = torch.zeros_like(logits_BV, dtype=torch.bool)
            for row, prompt in zip(seen, prompts, strict=True):
                row[prompt] = True
        tokens_B = sample_tokens(logits_BV, sampling, generator, seen).to(rows[0].device)
        if seen is not None:
            seen.scatter_(1, tokens_B[:, None], True)
        rows[:] = [torch.cat((row, token[None])) for row, token in zip(rows, tokens_B, strict=True)]
        yield tokens_B


def _stream_logits(model: Model, rows: Sequence[Tensor], context: int | None) -> Iterator[Tensor]:
    """Yield the logits of the next token of each row, [B, V]. The caller adds a token to each row before the next."""
    if can_cache(model):
        cache = KeyValueCache(cast(Transformer, model), torch.tensor([len(row) for row in rows], device=rows[0].device))
        tokens_BT = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
        while context is None or cache.longest + cache.is_filled <= context:
            yield _next_logits(cache, tokens_BT)
            tokens_BT = torch.stack([row[-1:] for row in rows])
    while True:
        yield torch.cat([_last_logits(model, row if context is None else row[-context:]) for row in rows])


@torch.no_grad()
def _next_logits(cache: KeyValueCache, tokens_BT: Tensor) -> Tensor:
    """Return the logits after the last token of each row, [B, V], and add the tokens to the cache."""
    model = cache.model
    last_B = torch.zeros_like(cache.lengths_B) if cache.is_filled else cache.lengths_B - 1

    def head(x_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        rows = torch.arange(len(x_BTD), device=x_BTD.device)
        return cap_logits(model.logits(x_BTD[rows, last_B], weight_VD), model.spec.logits_softcap)

    with cache.extended():
        logits_BV, _ = model(tokens_BT, head=head)
    return cast(Tensor, logits_BV)


@torch.no_grad()
def _last_logits(model: Model, tokens_T: Tensor) -> Tensor:
    """Return the logits of the next token of one row, [1, V], by a pass of all of its tokens."""
    return logits_of(model, tokens_T[None])[:, -1]


def logits_of(model: Model, tokens_BT: Tensor) -> Tensor:
    """Return the logits of a model, [B, T, V], which may return an auxiliary loss too."""
    output = model(tokens_BT)
    return output[0] if isinstance(output, tuple) else output


def generate_batch(
    model: Model,
    prompts: Sequence[Tensor],
    count: int,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    ends: Collection[int] = (),
    context: int | None = None,
    vocab: int | None = None,
) -> list[list[int]]:
    """Return up to `count` new tokens of each prompt, the last of which is one of `ends` if it was drawn.

    Arguments are those of `stream_tokens`. Passes end when all rows have."""
    new: list[list[int]] = [[] for _ in prompts]
    for tokens_B in islice(stream_tokens(model, prompts, sampling, generator, context, vocab), count):
        for row, token in zip(new, tokens_B.tolist(), strict=True):
            if not row or row[-1] not in ends:
                row.append(token)
        if all(row[-1] in ends for row in new):
            break
    return new


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
    **options: Any,
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
        options: Further ones of transformers: `top_p`, `min_p`, `repetition_penalty` and `suppress_tokens`.

    Returns:
        The ids of the prompt and of the new tokens, [T + count].

    Example:
        >>> model, tokenizer = phalanx.load_model("runs/first")
        >>> prompt = torch.tensor(tokenizer.encode_batch(["def "])[0])
        >>> ids = phalanx.generate(model, prompt, 5, temperature=0.8, top_k=50, vocab=tokenizer.vocab)
        >>> len(ids) - len(prompt), tokenizer.decode(ids[: len(prompt)].tolist())
        (5, 'def ')"""
    sampling = Sampling(temperature, top_k, **options)
    stream = stream_tokens(model, [tokens_T], sampling, generator or torch.default_generator, context, vocab)
    new_tokens = [int(tokens_B[0]) for tokens_B in islice(stream, count)]
    if eos_id in new_tokens:
        stop = new_tokens.index(eos_id)
        new_tokens[stop:] = [eos_id] * (count - stop)
    return torch.cat((tokens_T, tokens_T.new_tensor(new_tokens)))
