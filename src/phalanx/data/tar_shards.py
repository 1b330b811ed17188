"""WebDataset shards: tar files whose consecutive members with equal names up to the first dot are a sample.

Members are read from the archive, one after the other; none is written to a disk. Links and devices are refused."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple


class TarMember(NamedTuple):
    """A file in a tar archive."""

    key: str
    """Name up to the first dot of the file's name, with its folders."""
    extension: str
    """Name after that dot."""
    content: bytes
    """Content; empty if it is none of the extensions that were asked for."""


class UnsafeMemberError(ValueError):
    """A member that is neither a file nor a folder."""


def read_samples(file: BinaryIO, extensions: set[str]) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield the key of each sample, and its members by extension, of which those in `extensions` have their content.

    Raises UnsafeMemberError for a link or a device, and tarfile.TarError if the archive is damaged, after the members
    before."""
    key = ""
    sample: dict[str, bytes] = {}
    try:
        for member in _read_members(file, extensions):
            if sample and member.key != key:
                yield key, sample
                sample = {}
            key = member.key
            sample[member.extension] = member.content
    except tarfile.TarError:
        if sample:
            yield key, sample
        raise
    if sample:
        yield key, sample


def _read_members(file: BinaryIO, extensions: set[str]) -> Iterator[TarMember]:
    with tarfile.open(fileobj=file, mode="r|") as archive:
        for member in archive:
            if member.isdir():
                continue
            if not member.isreg() or member.issparse():
                raise UnsafeMemberError(member.name)
            folder, slash, name = member.name.rpartition("/")
            stem, _, extension = name.partition(".")
            content = b""
            if extension in extensions:
                content_file = archive.extractfile(member)
                content = b"" if content_file is None else content_file.read()
            yield TarMember(f"{folder}{slash}{stem}", extension, content)
