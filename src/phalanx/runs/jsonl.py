"""Read files of JSON lines that other processes append to.

A line without a newline is still being written, or its writer was killed: no reader returns it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

from phalanx.runs.problems import Problem

JsonRecord = dict[str, Any]


def read_jsonl(path: Path) -> list[JsonRecord]:
    """Return the records of a file in order, without unreadable lines; none if the file does not exist."""
    content = path.read_bytes() if path.exists() else b""
    return [record for _, record in parse_jsonl(content) if record is not None]


def parse_jsonl(content: bytes) -> Iterator[tuple[bytes, JsonRecord | None]]:
    """Yield each complete line with its record, or with None if the line is not a JSON object."""
    for line in content.split(b"\n")[:-1]:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        yield line, record if isinstance(record, dict) else None


def read_valid_jsonl(path: Path, problems: list[Problem], keys: Set[str] = frozenset({"step"})) -> list[JsonRecord]:
    """Return the records of a file that have all `keys`.

    Args:
        path: The file.
        problems: A list to which the number of unreadable lines is added.
        keys: The required keys.
    """
    records = [record for _, record in parse_jsonl(path.read_bytes())]
    valid = [record for record in records if record is not None and keys <= record.keys()]
    if unreadable := len(records) - len(valid):
        problems.append(Problem("unreadable lines", {"file": f"{path.parent.name}/{path.name}", "lines": unreadable}))
    return valid


class JsonlTail:
    """Reader of a file that grows and may be replaced; each call returns only new records."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = 0
        self._offset = 0

    def read_new(self) -> tuple[bool, list[JsonRecord]]:
        """Return the records since the last call, without unreadable lines.

        Returns:
            Whether the file was replaced, shortened or removed, so that all earlier records are void; the new records.
        """
        try:
            status = self.path.stat()
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
        return replaced, [record for _, record in parse_jsonl(content) if record is not None]
