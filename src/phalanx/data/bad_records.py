"""Broken records of text, which a run skips and lists up to `data.max_bad_records`."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.spec.errors import UserError
from phalanx.spec.files.tables import parse_json
from phalanx.spec.formatting import plural

logger = logging.getLogger(__name__)

BAD_RECORDS_FILE = "bad_records.jsonl"
"""The list in a run directory."""
BAD_RECORDS_SUFFIX = ".bad_records.jsonl"
"""Suffix of the list of a .bin/.idx pair."""


@dataclass(frozen=True)
class BadRecord:
    """A record without text that can be read."""

    file: str
    record: int | None
    """Line, row or sample of the file, from 1; None for the rest of a file whose end is damaged, or all of it."""
    reason: str


class BadRecords:
    """The broken records of a source that were found so far, at most `limit` different ones.

    `field` (or option) sets the limit. With `file`, each is listed there as soon as it is found."""

    def __init__(self, limit: int = 0, field: str = "data.max_bad_records", file: Path | None = None) -> None:
        self.limit = limit
        self.field = field
        self.file = file
        self.found: dict[tuple[str, int | None], BadRecord] = {}

    def add(self, file: str, record: int | None, error: UserError) -> None:
        """Add a broken record. Raises its error if it is one too many."""
        if (file, record) in self.found:
            return
        if len(self.found) >= self.limit:
            # A fault of the first record is likely to be one of the settings.
            if self.limit:
                error.problem += f", after {plural(self.limit, 'broken record')}, which {self.field} allows"
                error.fix += f"; or increase {self.field}"
            elif record != 1:
                error.fix += f"; or skip broken records with {self.field}"
            raise error
        bad_record = BadRecord(file, record, str(error).partition("\n")[0])
        self.found[file, record] = bad_record
        if self.file is not None:
            if len(self.found) == 1:
                logger.warning("broken records are skipped, and listed in %s: %s", self.file, bad_record.reason)
            with self.file.open("a") as lines:
                lines.write(_encode(bad_record))

    @property
    def list(self) -> list[BadRecord]:
        """The broken records in the order in which they were found."""
        return list(self.found.values())


def write_bad_records(path: str | Path, records: Sequence[BadRecord]) -> None:
    """Write a list of broken records, a JSON line each. Without any, no file remains."""
    if records:
        Path(path).write_text("".join(map(_encode, records)))
    else:
        Path(path).unlink(missing_ok=True)


def read_bad_records(path: str | Path) -> list[BadRecord]:
    """Return the different records of a list; none if the file does not exist.

    Lines that are damaged, such as the last one after a kill, are left out."""
    records = []
    with suppress(FileNotFoundError):
        for line in Path(path).read_bytes().splitlines():
            with suppress(ValueError, TypeError):
                records.append(BadRecord(**parse_json(line)))
    return list(dict.fromkeys(records))


def describe_bad_records(records: Sequence[BadRecord]) -> str:
    """Return a line about skipped records, with the first of them."""
    return f"{plural(len(records), 'broken record')} skipped; the first: {records[0].reason}"


def _encode(record: BadRecord) -> str:
    return json.dumps(asdict(record)) + "\n"
