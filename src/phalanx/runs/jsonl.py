"""Read files of JSON lines that other processes append to.

A line without a newline is still being written, or its writer was killed: no reader returns it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.runs.decode import Decode, T, check_regular_file, decode_object, read_bytes, unreadable_file

JsonRecord = dict[str, Any]


def read_jsonl(path: Path) -> list[JsonRecord]:
    """Return the objects of a file in order, without damaged lines; none if the file cannot be read."""
    return read_valid_jsonl(path, [], decode_object)


def parse_jsonl(content: bytes, decode: Decode[T]) -> Iterator[tuple[bytes, T | None]]:
    """Yield each complete line with its record, or with None if it is damaged."""
    for line in content.split(b"\n")[:-1]:
        try:
            record = decode(line)
        except ValueError:
            record = None
        yield line, record


def read_valid_jsonl(path: Path, problems: list[str], decode: Decode[T]) -> list[T]:
    """Return the records of a file in order, without damaged lines.

    An unreadable file or the number of damaged lines is added to `problems`.
    """
    try:
        records = [record for _, record in parse_jsonl(read_bytes(path), decode)]
    except OSError:
        problems.append(unreadable_file(path))
        return []
    valid = [record for record in records if record is not None]
    if damaged := len(records) - len(valid):
        problems.append(f"{path.parent.name}/{path.name}: {damaged} lines cannot be read")
    return valid


def lines_from_end(path: Path, block_bytes: int = 2**16) -> Iterator[bytes]:
    """Yield the complete lines of a file from the last to the first, and read no more of it than is asked for.

    Raises OSError if the file cannot be read.
    """
    check_regular_file(path)
    with path.open("rb") as file:
        position = file.seek(0, os.SEEK_END)
        # Blocks of the line that begins before `position`, the last first: joined once, as a damaged file is one line.
        rest: list[bytes] = []
        is_end = True
        while position:
            start = max(0, position - block_bytes)
            file.seek(start)
            first, *lines = file.read(position - start).split(b"\n")
            if lines:
                lines[-1] += b"".join(reversed(rest))
                rest = []
            rest.append(first)
            # The text after the last newline is still being written.
            yield from reversed(lines[:-1] if is_end and lines else lines)
            is_end = is_end and not lines
            position = start
        if not is_end:
            yield b"".join(reversed(rest))


class JsonlTail:
    """Reader of a file that grows and may be replaced; each call returns only new records."""

    def __init__(self, path: Path, decode: Decode[JsonRecord] = decode_object) -> None:
        self.path = path
        self._decode = decode
        self._inode = 0
        self._offset = 0

    def read_new(self) -> tuple[bool, list[JsonRecord]]:
        """Return whether earlier records are void, and the records since the last call, without unreadable lines.

        Earlier records are void if the file was replaced, shortened or removed.
        """
        try:
            status = self.path.stat()
            if not stat.S_ISREG(status.st_mode):  # a pipe would block
                raise OSError
            replaced = status.st_ino != self._inode or status.st_size < self._offset
            start = 0 if replaced else self._offset
            with self.path.open("rb") as file:
                file.seek(start)
                content = file.read()
        except OSError:
            replaced, self._inode, self._offset = self._inode != 0, 0, 0
            return replaced, []
        self._inode = status.st_ino
        self._offset = start + content.rfind(b"\n") + 1
        return replaced, [record for _, record in parse_jsonl(content, self._decode) if record is not None]
