"""Tables and lines of text as all commands print them."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.table import Column, Table

from phalanx.spec.terminal import Terminal


def text_table(*columns: str | Column, numbers: Iterable[str] = ()) -> Table:
    """Return a table without borders, whose last columns are right-aligned numbers."""
    right_aligned = [Column(header, justify="right") for header in numbers]
    return Table(*columns, *right_aligned, box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))


def print_line(console: Terminal, text: RenderableType, style: str | None = None) -> None:
    """Print a line as it is: unbroken, and with numbers in the same color."""
    console.print(text, style=style, highlight=False, soft_wrap=True)
