"""Writer of output files that replaces only files of the same kind that Phalanx wrote, and no changed run file."""

from __future__ import annotations

import os
import re
from pathlib import Path

from phalanx.spec.errors import UserError
from phalanx.spec.files.replace import replace_file
from phalanx.spec.formatting import WRITTEN_BY

HEAD_BYTES = 2000
RUN_FILE = "run file"
KINDS = {
    RUN_FILE: rf"# {WRITTEN_BY} plan\b",
    "machine file": rf"# {WRITTEN_BY} calibrate\b",
    "job file": rf"(#!/bin/bash\n)?# {WRITTEN_BY} launch\b",
    "html": "<!doctype html>",
    "svg": r"<svg|<\?xml",
    "png": "\x89PNG",
    "json": r"\{",
}
"""Start of each kind of file, as a regular expression. The kind of a picture is the suffix of its name."""
FIX = "choose another name, or remove it"


def check_replaceable(option: str, file: Path, kind: str) -> None:
    """Raise UserError if a file exists that is not of a kind of `KINDS` and by Phalanx, or is a dangling link.

    An existing run file passes, because the text that would replace it is not known yet: see `write_file`.
    """
    if file.is_symlink() and not file.exists():
        raise UserError(option, str(file), "is a link to a file that does not exist", fix="remove the link")
    if not file.is_file():  # a new file or a pipe; a directory fails when it is written
        return
    try:
        with file.open("rb") as existing:
            head = existing.read(HEAD_BYTES).decode("latin-1")
    except OSError:
        return
    if head and WRITTEN_BY not in head:
        raise UserError(option, str(file), "exists, and was not written by phalanx", FIX)
    if head and (existing_kind := _kind_of(head)) != kind:
        problem = f"exists with another kind of content: {existing_kind} instead of {kind}"
        raise UserError(option, str(file), problem, FIX)


def check_output_file(option: str, file: Path, run: Path, kind: str) -> None:
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
    check_replaceable(option, file, kind)


def write_file(option: str, file: Path, text: str, replaces_link: bool = False) -> None:
    """Write the file of an option; the text and an existing file must have WRITTEN_BY in their headers.

    With `replaces_link`, a link in the file's place is replaced and not followed: a run directory may be someone
    else's. Raises UserError if the file cannot be written, or would replace one of the user's: also a run file with
    other content, because users complete planned run files.
    """
    if not (replaces_link and file.is_symlink()):
        kind = _kind_of(text)
        check_replaceable(option, file, kind)
        if kind == RUN_FILE and file.is_file() and (old := file.read_bytes()) and old != text.encode():
            raise UserError(option, str(file), "exists, and is a run file with other content", FIX)
    try:
        if replaces_link:
            replace_file(file, text)
        else:
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(option, str(file), f"cannot be written: {error.strerror}", fix="choose another name") from None


def _kind_of(text: str) -> str:
    return next((kind for kind, start in KINDS.items() if re.match(start, text)), "unknown")
