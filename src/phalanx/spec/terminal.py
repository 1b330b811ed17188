"""Console for text that may come from files of others: it prints no control characters, markup or emoji codes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from phalanx.spec.formatting import printable


class Terminal(Console):
    """Console of all commands. Styles are objects of rich, and text is printed as it is."""

    def __init__(self, *, stderr: bool = False, file: Any = None, **options: Any) -> None:
        stream = sys.stderr if stderr else sys.stdout
        raw_file = file or getattr(stream, "rich_proxied_file", stream)
        super().__init__(file=raw_file, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text of a cell or title; its length is that of the printable text."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of an object with printable text; only rich itself moves the cursor."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


class PrintableStream:
    """Text stream that writes control characters as escapes."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream
        """The stream to which consoles of rich write colors; rich looks for this name."""

    def write(self, text: str) -> int:
        """Write a text."""
        return self.rich_proxied_file.write(printable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


@contextmanager
def printable_output() -> Iterator[None]:
    """Replace stdout and stderr by streams that write control characters as escapes."""
    stdout: Any = PrintableStream(sys.stdout)
    stderr: Any = PrintableStream(sys.stderr)
    with redirect_stdout(stdout), redirect_stderr(stderr):
        yield
