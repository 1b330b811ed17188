"""Journal of events: one line of JSON each, which is on disk when `append` returns.

Why: `docs/design/decisions/swarm-journal.md`.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from phalanx.runs.decode import MAX_NUMBER, read_bytes
from phalanx.runs.jsonl import JsonRecord, parse_jsonl
from phalanx.runs.swarm_records import EVENT_TYPES, decode_journal_event
from phalanx.spec.errors import UserError
from phalanx.spec.files.replace import open_no_link, replace_file

RESTORE = "restore it from a copy, or start a new swarm in another directory"
"""Fix of a damaged journal."""
ALIVE_FILE = "alive"
"""Time at which the coordinator was last alive, next to the journal."""
ALIVE_SECONDS = 1.0


def _decode_known_event(line: bytes) -> JsonRecord:
    event: JsonRecord = decode_journal_event(line)
    if event["kind"] not in EVENT_TYPES:
        raise ValueError(f"no event is named {event['kind']!r}")
    return event


class Journal:
    """An open journal with the events read at the start.

    An incomplete last line was never acted on, and is removed.
    """

    def __init__(self, path: Path) -> None:
        """Open a journal; raise UserError if the file is not a journal."""
        self.path = path
        self.events: list[JsonRecord] = []
        try:
            content = read_bytes(path) if path.exists() or path.is_symlink() else b""
            self._file = open(path, "ab", buffering=0, opener=open_no_link)  # noqa: SIM115 -- `close` closes it
        except OSError as error:
            raise UserError("journal", str(path), f"cannot be opened: {error.strerror}", RESTORE) from None
        for number, (_, event) in enumerate(parse_jsonl(content, _decode_known_event), start=1):
            if event is None:
                raise UserError("journal", f"{path}, line {number}", "is not an event", RESTORE)
            self.events.append(event)
        self._size = content.rfind(b"\n") + 1
        self._alive_path = path.with_name(ALIVE_FILE)
        self._marked_at = 0.0

    def append(self, event: JsonRecord) -> None:
        """Write an event, and wait until it is on disk.

        Raises OSError if the disk is full, for example. The event is not in the journal, and may be written again.
        Raises ValueError if a restart could not read the event. It is not in the journal.
        """
        line = json.dumps(event, separators=(",", ":")).encode() + b"\n"
        _decode_known_event(line)
        # Remove the rest of an earlier event that could not be written in full.
        self._file.truncate(self._size)
        written = 0
        while written < len(line):
            written += self._file.write(line[written:])
        os.fsync(self._file.fileno())
        self._size += len(line)

    def mark_alive(self, now: float) -> None:
        """Save the present time once per `ALIVE_SECONDS`; from it, a restart derives the duration of the downtime."""
        if abs(now - self._marked_at) >= ALIVE_SECONDS:
            self._marked_at = now
            # Without this file, a restart uses the time of the last event.
            with suppress(OSError):
                replace_file(self._alive_path, repr(now))

    def last_alive(self) -> float:
        """Return when the coordinator that wrote this journal was last known to be alive."""
        last_event_at = float(self.events[-1]["at"])
        with suppress(OSError, ValueError):
            marked_at = float(self._alive_path.read_text())
            return max(last_event_at, marked_at) if marked_at <= MAX_NUMBER else last_event_at
        return last_event_at

    def close(self) -> None:
        """Close the file."""
        self._file.close()
