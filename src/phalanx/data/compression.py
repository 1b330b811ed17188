"""Compressed text, recognized by its first bytes, whatever the file name."""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

from phalanx.spec.extras import missing_package

COMPRESSED_SUFFIXES = (".gz", ".zst", ".zstd", ".bz2", ".xz")
READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""Errors of the file system, and of truncated or damaged files."""
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
OPENERS: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}


def open_decompressed(path: str, field: str) -> BinaryIO:
    """Open a file for reading, and decompress it if it is compressed.

    Raises UserError if a package that the compression needs is not installed; reported under `field`."""
    magic = _read_magic(path)
    if magic.startswith(ZSTD_MAGIC):
        pyarrow = import_extra("pyarrow", field, path)
        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(path), "zstd"))
    opener = next((opener for prefix, opener in OPENERS.items() if magic.startswith(prefix)), open)
    return opener(path, "rb")


def is_compressed(path: str) -> bool:
    """Return whether `open_decompressed` decompresses a file."""
    return _read_magic(path).startswith((ZSTD_MAGIC, *OPENERS))


def _read_magic(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(6)


def import_extra(module: str, field: str, source: str) -> Any:
    """Import a module of the optional packages for data, which `source` in `field` needs.

    Raises UserError if the module is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise missing_package(field, source, module.partition(".")[0]) from None
