"""Writer of output files that replaces only files that Phalanx wrote."""

from __future__ import annotations

from pathlib import Path

from phalanx.spec.errors import UserError
from phalanx.spec.files.replace import replace_file
from phalanx.spec.formatting import WRITTEN_BY

HEAD_BYTES = 2000


def check_replaceable(option: str, file: Path) -> None:
    """Raise UserError if the file exists without the header of a file that Phalanx wrote, or is a dangling link."""
    if file.is_symlink() and not file.exists():
        raise UserError(option, str(file), "is a link to a file that does not exist", fix="remove the link")
    if not file.is_file():  # a new file or a pipe; a directory fails when it is written
        return
    try:
        with file.open("rb") as existing:
            head = existing.read(HEAD_BYTES)
    except OSError:
        return
    if head and WRITTEN_BY.encode() not in head:
        raise UserError(
            option, str(file), "exists, and was not written by phalanx", fix="choose another name, or remove it"
        )


def write_file(option: str, file: Path, text: str) -> None:
    """Write the file of an option.

    Args:
        option: Option that names the file, for errors.
        file: File to write; an existing one must have WRITTEN_BY in its header.
        text: Content, with WRITTEN_BY in its header.

    Raises:
        UserError: The file cannot be written, or would replace one of the user's.
    """
    check_replaceable(option, file)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _not_writable(option, file, error) from None


def write_page_of_run(option: str, file: Path, text: str) -> None:
    """Write a file in a run directory, which may be someone else's: a link in its place is replaced, not followed.

    Args:
        option: Option that names another file, for errors.
        file: File to write; an existing one must have WRITTEN_BY in its header.
        text: Content, with WRITTEN_BY in its header.

    Raises:
        UserError: The file cannot be written, or would replace one of the user's.
    """
    if not file.is_symlink():
        check_replaceable(option, file)
    try:
        replace_file(file, text)
    except OSError as error:
        raise _not_writable(option, file, error) from None


def _not_writable(option: str, file: Path, error: OSError) -> UserError:
    return UserError(option, str(file), f"cannot be written: {error.strerror}", fix="choose another name")
