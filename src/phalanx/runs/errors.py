"""Errors that end training for good: it would fail again."""

from __future__ import annotations

from collections.abc import Sequence


class DivergenceError(RuntimeError):
    """Training cannot go on from here: all ranks found so together, and `suspect_ranks` are those that it is due to."""

    def __init__(self, message: str, suspect_ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.suspect_ranks = list(suspect_ranks)


class CorruptionError(DivergenceError):
    """Ranks no longer hold alike what they must: nobody knows since when, so that no checkpoint is known to be good."""


class CollectiveOrderError(DivergenceError):
    """Ranks called collectives, or sent messages, in different orders. Only the first rank finds it."""
