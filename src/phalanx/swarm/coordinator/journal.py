"""Events on disk: a line of JSON each, there to stay once `append` returns."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from phalanx.spec.errors import UserError


class Journal:
    """An open journal; `events` are those that were there. What was cut off in the middle of a line was never acted on,
    and is taken away."""

    def __init__(self, path: Path) -> None:
        """Raises UserError for a file that is no journal."""
        self.path, self.events, whole = path, [], 0
        content = path.read_bytes() if path.exists() else b""
        for number, line in enumerate(content.splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                break
            try:
                event: dict[str, Any] = json.loads(line)
                event["what"]
            except (ValueError, KeyError, TypeError):
                fix = "restore it from a copy, or begin a new swarm in another directory"
                raise UserError("journal", f"{path}, line {number}", "is no event", fix) from None
            self.events.append(event)
            whole += len(line)
        self._file = path.open("ab")
        self._file.truncate(whole)

    def append(self, event: dict[str, Any]) -> None:
        """Write an event, and wait until the disk has it."""
        self._file.write(json.dumps(event, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Nothing more is written."""
        self._file.close()
