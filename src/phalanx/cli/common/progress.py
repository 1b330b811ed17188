"""Progress bars: tokenization and the search for layouts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from phalanx.data.tokenize import Progress, TokenizationCounts
    from phalanx.plan.search.search import ProgressCallback


@contextmanager
def tokenization_progress() -> Iterator[Progress]:
    """A line on a terminal that counts documents and tokens, and vanishes when they are ready."""
    with Console(stderr=True).status("reading the text ...") as status:
        yield lambda counts: status.update(f"tokenizing: {format_counts(counts)}")


def format_counts(counts: TokenizationCounts) -> str:
    """Format the numbers of documents and tokens."""
    return f"{counts.documents:,} documents, {counts.tokens:,} tokens"


@contextmanager
def search_progress(devices: int) -> Iterator[ProgressCallback]:
    """A bar on a terminal that vanishes when the search ends: layouts evaluated, then how many of the fastest that are
    asked for were found to run and fit. Nothing where stderr is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    console = Console(stderr=True)
    hidden = not sys.stderr.isatty()
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task(f"layouts of {devices:,} devices", total=None)
        yield lambda description, completed, total: progress.update(
            task, description=description, completed=completed, total=total
        )
