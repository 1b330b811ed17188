"""Simulate a ring all-reduce message by message, as a reference for the formulas of `cost/formulas`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class RingMessage:
    """One message on the ring: in `step` (from 1), `source` sends its copy of `chunk` to `target`."""

    step: int
    source: int
    target: int
    chunk: int


def reduce_scatter_sends(ranks: int) -> list[RingMessage]:
    """Simulate a reduce-scatter: each rank starts with the chunk of its
    number, and ends with the sum of the next chunk."""
    return _ring(ranks, first=0)


def all_gather_sends(ranks: int) -> list[RingMessage]:
    """Simulate an all-gather: each rank starts with the chunk whose sum it has after the reduce-scatter."""
    return _ring(ranks, first=1)


def _ring(ranks: int, first: int) -> list[RingMessage]:
    """Return the messages of N - 1 steps. Rank r sends chunk r + `first`,
    and then always the chunk that it just received."""
    return [
        RingMessage(step, rank, (rank + 1) % ranks, (rank + first - (step - 1)) % ranks)
        for step in range(1, ranks)
        for rank in range(ranks)
    ]


@dataclass(frozen=True)
class RingResult:
    """Result of a ring all-reduce."""

    sums: list[list[float]]
    """Sum over all ranks, as each rank has it at the end."""
    owner: list[int]
    """Rank that had the sum of each chunk after the reduce-scatter."""
    steps: tuple[int, int]
    """Steps of the reduce-scatter and of the all-gather."""
    sent: list[tuple[int, int]]
    """Elements that each rank sent in the reduce-scatter and in the all-gather."""


def ring_all_reduce(values: Sequence[Sequence[float]]) -> RingResult:
    """Sum the ranks' `values`, of equal length, by sending chunks to the next rank only.

    A reduce-scatter and an all-gather over N chunks whose sizes differ by one element at most (Patarasuk & Yuan, J.
    Parallel Distrib. Comput. 69, 2009). Each rank sends 2 (N-1)/N of the elements; no algorithm needs fewer."""
    ranks = len(values)
    chunks_by_rank = [_chunks(local_values, ranks) for local_values in values]
    sizes = [len(chunk) for chunk in chunks_by_rank[0]]
    scatter, gather = reduce_scatter_sends(ranks), all_gather_sends(ranks)
    owner = list(range(ranks))
    for send in scatter:  # the order does not matter: in a step, no rank receives the chunk that it sends
        source, target = chunks_by_rank[send.source], chunks_by_rank[send.target]
        target[send.chunk] = [a + b for a, b in zip(source[send.chunk], target[send.chunk], strict=True)]
        owner[send.chunk] = send.target
    for send in gather:
        chunks_by_rank[send.target][send.chunk] = chunks_by_rank[send.source][send.chunk]
    return RingResult(
        sums=[[x for chunk in chunks for x in chunk] for chunks in chunks_by_rank],
        owner=owner,
        steps=(len(scatter) // ranks, len(gather) // ranks),
        sent=[(_elements_sent(scatter, rank, sizes), _elements_sent(gather, rank, sizes)) for rank in range(ranks)],
    )


def _chunks(values: Sequence[float], count: int) -> list[list[float]]:
    bounds = [chunk * len(values) // count for chunk in range(count + 1)]
    return [list(values[start:end]) for start, end in pairwise(bounds)]


def _elements_sent(sends: list[RingMessage], rank: int, sizes: list[int]) -> int:
    return sum(sizes[send.chunk] for send in sends if send.source == rank)
