"""Progress bars of tokenization and the search for layouts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from phalanx.spec.terminal import Terminal

if TYPE_CHECKING:
    from phalanx.data.tokenize import Progress, TokenizationCounts
    from phalanx.plan.search.search import ProgressCallback


@contextmanager
def tokenization_progress() -> Iterator[Progress]:
    """Show a line with the numbers of documents and tokens on a terminal; remove it at the end."""
    with Terminal(stderr=True).status("reading the text ...") as status:
        yield lambda counts: status.update(f"tokenizing: {format_counts(counts)}")


def format_counts(counts: TokenizationCounts) -> str:
    """Format the numbers of documents and tokens."""
    return f"{counts.documents:,} documents, {counts.tokens:,} tokens"


@contextmanager
def search_progress(devices: int) -> Iterator[ProgressCallback]:
    """Show a progress bar of the search on a terminal; remove it at the end.

    It counts evaluated layouts, then those of the requested fastest that run and fit. Without a terminal on stderr,
    nothing is shown.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    console = Terminal(stderr=True)
    hidden = not sys.stderr.isatty()
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task(f"layouts of {devices:,} devices", total=None)
        yield lambda description, completed, total: progress.update(
            task, description=description, completed=completed, total=total
        )
