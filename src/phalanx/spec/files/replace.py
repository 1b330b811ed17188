"""Writing of files in directories whose content others may have made."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(file: Path, text: str) -> None:
    """Write a file so that readers find it complete or not at all; a link in its place is replaced, not followed.

    Raises OSError if the file cannot be written.
    """
    partial_file = file.with_name(f"{file.name}.{os.getpid()}.partial")
    partial_file.unlink(missing_ok=True)
    try:
        with open(partial_file, "x", encoding="utf-8", opener=open_no_link) as opened:
            opened.write(text)
        partial_file.replace(file)
    except OSError:
        partial_file.unlink(missing_ok=True)
        raise


def open_no_link(path: str, flags: int) -> int:
    """Open a file for `open`. A link in its place raises OSError, wherever it leads."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
