"""Write the file that an option names, over nothing that Phalanx did not write."""

from __future__ import annotations

from pathlib import Path

from phalanx.spec.errors import UserError

HEAD_BYTES = 1000


def check_replaceable(option: str, file: Path) -> None:
    """Raise UserError if a file is there that does not name Phalanx at its head, as all that it writes does."""
    try:
        with file.open("rb") as existing:
            head = existing.read(HEAD_BYTES)
    except OSError:  # there is none, or writing it says what is wrong
        return
    if head and b"phalanx" not in head.lower():
        raise UserError(option, str(file), "is there already, and not written by phalanx", "name another file")


def write_file(option: str, file: Path, text: str) -> None:
    """Write what an option asks for; `text` names Phalanx at its head.

    Raises UserError if the file cannot be written, or would replace one of the user's.
    """
    check_replaceable(option, file)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(option, str(file), f"cannot be written: {error.strerror}", "name another file") from None
