"""What a person sees while text becomes tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from phalanx.data.encode import Counts, Progress


@contextmanager
def preparing() -> Iterator[Progress]:
    """A line on a terminal that counts documents and tokens, and vanishes when they are ready."""
    with Console(stderr=True).status("reading the text ...") as status:
        yield lambda counts: status.update(describe(counts))


def describe(counts: Counts) -> str:
    """Documents and tokens so far."""
    return f"tokenizing: {counts.documents:,} documents, {counts.tokens:,} tokens"
