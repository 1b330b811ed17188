"""Read the commands of a Markdown page.

A fenced block of `console` has commands: lines that start with `$ `, lines after a line that ends with a backslash,
and here-documents. Other lines are output. Blocks may be indented, as those of a note. A fenced block with a
`title="FILE"` is a file that the commands after it read. A line `<!-- not run: REASON -->` right before a block of
commands says why the test of the page leaves the block out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
FENCE = re.compile(r"( *)```(\w*)(?: title=\"([^\"]+)\")?$")
HERE_DOCUMENT = re.compile(r"<<'(\w+)'$")


@dataclass(frozen=True)
class FencedBlock:
    """A fenced block of a page."""

    line: int
    """Number of the first line, which is the fence."""
    language: str
    title: str
    """Name of the file with the content of the block; "" for other blocks."""
    not_run: str
    """Reason why the commands are not run; "" if they are."""
    body: tuple[str, ...]

    @property
    def commands(self) -> list[str]:
        """Return the commands of a console block, each with its continuation lines."""
        commands: list[str] = []
        continued, here_document_end = False, ""
        for line in self.body if self.language == "console" else ():
            if continued or here_document_end:
                commands[-1] += "\n" + line
            elif line.startswith("$ "):
                commands.append(line.removeprefix("$ "))
            else:
                continue
            if here_document_end:
                here_document_end = "" if line == here_document_end else here_document_end
            elif begin := HERE_DOCUMENT.search(line):
                here_document_end = begin[1]
            continued = not here_document_end and line.endswith("\\")
        return commands


def fenced_blocks(page: str) -> Iterator[FencedBlock]:
    """Yield the fenced blocks of a page in their order. Raises ValueError for a block that does not end."""
    lines = page.splitlines()
    index = 0
    while index < len(lines):
        fence = FENCE.match(lines[index])
        if not fence:
            index += 1
            continue
        try:
            end = lines.index(f"{fence[1]}```", index + 1)
        except ValueError:
            raise ValueError(f"line {index + 1}: the fenced block does not end") from None
        reason = NOT_RUN.match(lines[index - 1].strip()) if index else None
        body = tuple(line.removeprefix(fence[1]) for line in lines[index + 1 : end])
        yield FencedBlock(index + 1, fence[2], fence[3] or "", reason[1] if reason else "", body)
        index = end + 1


def lines_outside_fences(page: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page that are not in a fenced block, with their numbers."""
    lines = page.splitlines()
    blocks = list(fenced_blocks(page))
    fenced = {number for block in blocks for number in range(block.line, block.line + len(block.body) + 2)}
    yield from ((number, line) for number, line in enumerate(lines, 1) if number not in fenced)
