"""Segments of a sequence in which a scan with a state is computed."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

CHUNK = 64
"""Tokens that see each other directly. Later ones see them through the state."""
SEGMENT_CHUNKS = 4
"""Chunks that are computed together. The backward pass starts from the states before segments."""


class Segment(NamedTuple):
    """Equal chunks of consecutive tokens."""

    start: int
    """Index of the first token in its row."""
    chunks: int
    chunk: int
    """Tokens of a chunk."""

    @property
    def stop(self) -> int:
        """Index after the last token."""
        return self.start + self.chunks * self.chunk


@cache
def scan_segments(tokens: int) -> tuple[Segment, ...]:
    """Return the segments of a row of tokens. The last tokens may be a shorter chunk, which is a segment."""
    chunks, rest = divmod(tokens, CHUNK)
    full = [
        Segment(first * CHUNK, min(SEGMENT_CHUNKS, chunks - first), CHUNK) for first in range(0, chunks, SEGMENT_CHUNKS)
    ]
    return (*full, *([Segment(chunks * CHUNK, 1, rest)] if rest else []))


def mean_chunk(tokens: int) -> float:
    """Return the mean over a row's tokens of the tokens of their chunks."""
    return sum(segment.chunks * segment.chunk**2 for segment in scan_segments(tokens)) / tokens
