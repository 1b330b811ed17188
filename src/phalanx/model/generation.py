"""Generation of text by a language model. Shapes: B rows, T tokens, D width, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from phalanx.model.dtypes import at_least_fp32
from phalanx.model.sampling import Sampling, sample_tokens
from phalanx.model.token_cache import TokenCache, can_cache
from phalanx.model.transformer import HeadFunction, Transformer, cap_logits
from phalanx.spec.chunks import logits_chunk_rows

Model = Callable[[Tensor], Tensor | tuple[Tensor, Tensor]]
Choose = Callable[[Tensor], Tensor]
"""Function of the logits of next tokens, [B, V], that returns a token of each row, int64 [B]."""
Places = tuple[Tensor, Tensor]
"""Rows and positions of some tokens, int64 [N] each."""


class Predictor:
    """The next tokens of a model in one process (of one in several: `parallel.inference.SharedModel`)."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.transformer: Transformer | None = model if isinstance(model, Transformer) else None
        """The network whose mixers may keep what they need of earlier tokens."""
        self.has_cache = self.transformer is not None and can_cache(self.transformer)

    @torch.no_grad()
    def next_tokens(self, tokens_BT: Tensor, last_B: Tensor, choose: Choose) -> Tensor:
        """Return what is chosen by the logits after token `last_B` of each row, of which later ones are padding."""
        if self.transformer is not None:
            return choose(self.transformer(tokens_BT, head=head_of_last(self.transformer, last_B))[0])
        return choose(_rows_at(logits_of(self.model, tokens_BT), last_B))

    @torch.no_grad()
    def score_targets(self, tokens_BT: Tensor, places: Places, target_N: Tensor, vocab: int) -> Tensor:
        """Return the scores of tokens that follow those at N places, [N, 2], as `head_of_targets` does."""
        if self.transformer is not None:
            head = head_of_targets(self.transformer, places, target_N, vocab)
            return self.transformer(tokens_BT, head=head)[0]
        return _score_targets(logits_of(self.model, tokens_BT)[places], target_N, vocab)


def head_of_last(model: Transformer, last_B: Tensor) -> HeadFunction:
    """Return the function of the head that computes the logits after one token of each row, [B, V]."""

    def head(x_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        return cap_logits(model.logits(_rows_at(x_BTD, last_B), weight_VD), model.spec.logits_softcap)

    return head


def head_of_targets(
    model: Transformer,
    places: Places,
    target_N: Tensor,
    vocab: int,
    first_id: int = 0,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> HeadFunction:
    """Return the function of the head that scores the token after each of N places, [N, 2], in chunks of tokens.

    A score is the log-probability of the target among the first `vocab` ids, and 1 if it is the most likely of them,
    else 0. Of logits whose columns are shared by ranks, these begin with `first_id` here, and `gather` concatenates the
    numbers of all ranks along the last axis."""

    def head(x_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        x_ND = x_BTD[places]
        # Of all columns, so that ranks with fewer ones have equal chunks.
        rows = logits_chunk_rows(len(x_ND), model.spec.vocab_size, itemsize=4)
        scores = []
        for x, target in zip(x_ND.split(rows), target_N.split(rows), strict=True):
            logits = cap_logits(model.logits(x[None], weight_VD)[0], model.spec.logits_softcap)
            scores.append(_score_targets(logits, target, vocab, first_id, gather))
            # Free these logits before those of the next chunk are computed.
            del logits
        return torch.cat(scores)

    return head


def _score_targets(
    logits_NV: Tensor,
    target_N: Tensor,
    vocab: int,
    first_id: int = 0,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the scores of `head_of_targets` from the logits, which are overwritten."""
    logits_NV = at_least_fp32(logits_NV)
    logits_NV[:, max(0, vocab - first_id) :] = -math.inf
    column_N = target_N - first_id
    is_elsewhere = (column_N < 0) | (column_N >= logits_NV.shape[1])
    of_target_N = logits_NV.gather(1, column_N.masked_fill(is_elsewhere, 0)[:, None])[:, 0]
    best_N, best_column_N = logits_NV.max(1)
    parts = [logits_NV.logsumexp(1), of_target_N.masked_fill(is_elsewhere, -math.inf), best_N, best_column_N + first_id]
    parts_4N1 = torch.stack([part.to(logits_NV.dtype) for part in parts])[..., None]
    logsumexp_NR, of_target_NR, best_NR, best_id_NR = parts_4N1 if gather is None else gather(parts_4N1)
    best_id_N = best_id_NR.gather(1, best_NR.argmax(1, keepdim=True))[:, 0]
    return torch.stack([of_target_NR.amax(1) - logsumexp_NR.logsumexp(1), best_id_N == target_N], dim=1)


def _rows_at(x_BTD: Tensor, last_B: Tensor) -> Tensor:
    """Return the numbers of one token of each row, [B, D]."""
    return x_BTD[torch.arange(len(x_BTD), device=x_BTD.device), last_B]


def stream_tokens(
    model: Model | Predictor,
    prompts: Sequence[Tensor],
    sampling: Sampling,
    generator: torch.Generator | None = None,
    context: int | None = None,
    vocab: int | None = None,
) -> Iterator[Tensor]:
    """Yield an endless stream of next tokens of all prompts, int64 [B] each, with one forward pass per yield.

    `prompts` are ids [T], at least one each. The model sees the last `context` tokens, by default all, and draws from
    the first `vocab` ids. Up to `context` tokens, layers keep what they need of earlier ones (`TokenCache`)."""
    predictor = model if isinstance(model, Predictor) else Predictor(model)
    transformer = predictor.transformer
    rows = [prompt.long() for prompt in prompts]
    cache = None
    if transformer is not None and predictor.has_cache:
        cache = TokenCache(transformer, torch.tensor([len(row) for row in rows], device=rows[0].device))
    choose = _make_choice(prompts, sampling, generator, vocab)
    while True:
        if cache is not None and (context is None or cache.longest + cache.is_filled <= context):
            tokens_BT = pad_sequence([row[-1:] if cache.is_filled else row for row in rows], batch_first=True)
            with cache.extended():
                tokens_B = predictor.next_tokens(tokens_BT, cache.last_tokens, choose)
        else:
            seen = [row[-(context or 0) :] for row in rows]
            last_B = torch.tensor([len(row) - 1 for row in seen], device=rows[0].device)
            tokens_B = predictor.next_tokens(pad_sequence(seen, batch_first=True), last_B, choose)
        rows = [torch.cat((row, token[None])) for row, token in zip(rows, tokens_B, strict=True)]
        yield tokens_B


def _make_choice(
    prompts: Sequence[Tensor], sampling: Sampling, generator: torch.Generator | None, vocab: int | None
) -> Choose:
    """Return the function that draws next tokens. It remembers those of each row if their repetition has a penalty."""
    seen_BV: Tensor | None = None

    def choose(logits_BV: Tensor) -> Tensor:
        nonlocal seen_BV
        logits_BV = logits_BV[:, :vocab]
        if sampling.repetition_penalty != 1 and seen_BV is None:
            seen_BV = torch.zeros_like(logits_BV, dtype=torch.bool)
            for row, prompt in zip(seen_BV, prompts, strict=True):
                row[prompt] = True
        tokens_B = sample_tokens(logits_BV, sampling, generator, seen_BV).to(prompts[0].device)
        if seen_BV is not None:
            seen_BV.scatter_(1, tokens_B[:, None], True)
        return tokens_B

    return choose


def logits_of(model: Model, tokens_BT: Tensor) -> Tensor:
    """Return the logits of a model, [B, T, V], which may return an auxiliary loss too."""
    output = model(tokens_BT)
    return output[0] if isinstance(output, tuple) else output


def generate_batch(
    model: Model | Predictor,
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
    model: Model | Predictor,
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
