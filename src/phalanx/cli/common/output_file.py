"""Writer of output files that replaces only files that Phalanx wrote."""

from __future__ import annotations

import os
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
        fix = "choose another name, or remove it"
        raise UserError(option, str(file), "exists, and was not written by phalanx", fix=fix)


def check_output_file(option: str, file: Path, run: Path) -> None:
    """Raise UserError for a file that cannot be written, or that is the run file: before a search, not after it."""
    if file.resolve() == run.resolve():
        raise UserError(option, str(file), "is the run file itself", fix="choose another file")
    problem = ""
    if file.is_dir():
        problem = "it is a directory"
    elif not file.parent.is_dir():
        problem = f"there is no directory {file.parent}"
    elif not os.access(file if file.exists() else file.parent, os.W_OK):
        problem = "permission denied"
    if problem:
        raise UserError(option, str(file), f"cannot be written: {problem}", fix="choose another file")
    check_replaceable(option, file)


def write_file(option: str, file: Path, text: str, replaces_link: bool = False) -> None:
    """Write the file of an option; the text and an existing file must have WRITTEN_BY in their headers.

    With `replaces_link`, a link in the file's place is replaced and not followed: a run directory may be someone
    else's. Raises UserError if the file cannot be written, or would replace one of the user's.
    """
    if not (replaces_link and file.is_symlink()):
        check_replaceable(option, file)
    try:
        if replaces_link:
            replace_file(file, text)
        else:
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(option, str(file), f"cannot be written: {error.strerror}", fix="choose another name") from None
