"""Journal of events: one line of JSON each, which is on disk when `append` returns.

Why: `docs/design/decisions/swarm-journal.md`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from phalanx.runs.decode import read_bytes
from phalanx.runs.jsonl import JsonRecord, parse_jsonl
from phalanx.runs.swarm_records import decode_journal_event
from phalanx.spec.errors import UserError

RESTORE = "restore it from a copy, or start a new swarm in another directory"
"""Fix of a damaged journal."""


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
        try:
            content = read_bytes(path) if path.exists() or path.is_symlink() else b""
        except OSError as error:
            raise UserError("journal", str(path), f"cannot be read: {error.strerror}", fix=RESTORE) from None
        for number, (_, event) in enumerate(parse_jsonl(content, decode_journal_event), start=1):
            if event is None:
                raise UserError("journal", f"{path}, line {number}", "is not an event", fix=RESTORE)
            self.events.append(event)
        self._file = path.open("ab")
        self._file.truncate(content.rfind(b"\n") + 1)

    def append(self, event: JsonRecord) -> None:
        """Write an event, and wait until it is on disk."""
        self._file.write(json.dumps(event, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
