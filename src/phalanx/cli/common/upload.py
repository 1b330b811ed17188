"""Copies of written files in an object store, for the commands that write many."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Option

Upload = Annotated[
    str | None, Option(help="Folder in an object store to which the files are copied too.", metavar="s3://...")
]


def check_upload(url: str | None) -> None:
    """Raise UserError if files cannot be written to a folder of a store, before anything else is done."""
    if url is None:
        return
    from phalanx.data.places import check_writable

    check_writable("--upload", url.rstrip("/"))


def upload_files(files: Sequence[Path], url: str | None) -> None:
    """Copy files to a folder of a store under their names, and compare the copies; without a folder, do nothing."""
    if url is None:
        return
    from phalanx.data.places import errors_of_store
    from phalanx.runs.stored_shards import upload_verified

    folder = url.rstrip("/")
    for file in files:
        with errors_of_store("--upload", f"{folder}/{file.name}"):
            upload_verified(file, f"{folder}/{file.name}")
    print(f"copied {len(files)} files to {folder}", file=sys.stderr)
