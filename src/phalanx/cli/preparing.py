"""What a person sees while text becomes tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from phalanx.data.tokenize import Progress, TokenizationCounts


@contextmanager
def tokenization_progress() -> Iterator[Progress]:
    """A line on a terminal that counts documents and tokens, and vanishes when they are ready."""
    with Console(stderr=True).status("reading the text ...") as status:
        yield lambda counts: status.update(format_counts(counts))


def format_counts(counts: TokenizationCounts) -> str:
    """Documents and tokens so far."""
    return f"tokenizing: {counts.documents:,} documents, {counts.tokens:,} tokens"
