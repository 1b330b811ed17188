"""Journal of events: one line of JSON each, which is on disk when `append` returns.

Why: `docs/design/decisions/swarm-journal.md`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from phalanx.runs.jsonl import JsonRecord, parse_jsonl
from phalanx.spec.errors import UserError


class Journal:
    """An open journal with the events read at the start.

    An incomplete last line was never acted on, and is removed.
    """

    def __init__(self, path: Path) -> None:
        """Open a journal.

        Raises:
            UserError: The file is not a journal.
        """
        self.path = path
        self.events: list[JsonRecord] = []
        content = path.read_bytes() if path.exists() else b""
        for number, (_, event) in enumerate(parse_jsonl(content), start=1):
            if event is None or "what" not in event:
                fix = "restore it from a copy, or start a new swarm in another directory"
                raise UserError("journal", f"{path}, line {number}", "is not an event", fix=fix)
            self.events.append(event)
        self._file = path.open("ab", buffering=0)
        self._size = content.rfind(b"\n") + 1

    def append(self, event: JsonRecord) -> None:
        """Write an event, and wait until it is on disk.

        Raises:
            OSError: The disk is full, for example. The event is not in the journal, and may be written again.
        """
        line = json.dumps(event, separators=(",", ":")).encode() + b"\n"
        self._file.truncate(self._size)  # a part of an event that could not be written
        written = 0
        while written < len(line):
            written += self._file.write(line[written:])
        os.fsync(self._file.fileno())
        self._size += len(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
