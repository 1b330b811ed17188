"""Errors that end training permanently, because a restart would fail again."""

from __future__ import annotations

from collections.abc import Sequence


class DivergenceError(RuntimeError):
    """A state in which training cannot continue.

    All ranks detect it together; `suspect_ranks` are the probable causes.
    """

    def __init__(self, message: str, suspect_ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.suspect_ranks = list(suspect_ranks)


class CorruptionError(DivergenceError):
    """Replicas that differ between ranks.

    The first corrupt step is unknown, so no checkpoint is known to be valid.
    """


class CollectiveOrderError(DivergenceError):
    """Collectives or messages that ranks called in different orders. Only the first rank detects it."""


class CallbackError(RuntimeError):
    """An error in a user's callback, on the rank that raises it."""
