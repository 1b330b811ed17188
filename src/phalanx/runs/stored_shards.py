"""The file objects.json of a checkpoint in an object store: where its shards are, and checksums of their blocks.

Shards are read by ranges, which a checksum of the whole file does not cover. A range is therefore extended to whole
blocks, each of which has a CRC-32.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import StringConstraints
from typing_extensions import TypedDict

from phalanx.data.places import (
    DamagedTransferError,
    StoredObject,
    describe_object,
    errors_of_store,
    find_object,
    is_damaged,
    is_interrupted,
    is_transient,
    md5_of,
    multipart_md5,
    read_blocks,
    remove_objects,
    upload,
    with_retries,
)
from phalanx.runs.decode import Count, Decode, decoder, read_json
from phalanx.spec.errors import UserError
from phalanx.spec.files.replace import replace_file
from phalanx.spec.local_paths import check_store

CHECKSUMS_FILE = "SHA256SUMS"
OBJECTS_FILE = "objects.json"
BLOCK_BYTES = 8 * 2**20
BLOCKS_AT_ONCE = 8
"""Number of blocks that are read at the same time."""
FIELD = "checkpoint.directory"
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][\w.-]*$")]


class ShardRecord(TypedDict):
    """A shard in the store."""

    bytes: Count
    version: str
    """Version of the object (ETag) after its upload was verified."""
    crc32: list[Count]
    """Checksum of each block."""


class ShardRecords(TypedDict):
    """The content of objects.json."""

    url: str
    """The checkpoint's folder in the store."""
    shards: dict[FileName, ShardRecord]


_decode: Decode[ShardRecords] = decoder(ShardRecords)


def decode_shards(content: bytes) -> ShardRecords:
    """Decode objects.json. Raises ValueError if it is damaged, or names no object store."""
    records = _decode(content)
    check_store(FIELD, records["url"])
    for name, shard in records["shards"].items():
        if len(shard["crc32"]) != -(-shard["bytes"] // BLOCK_BYTES):
            raise ValueError(f"{name} has another number of blocks than checksums")
    return records


def read_shards(checkpoint: Path) -> ShardRecords | None:
    """Return where the shards of a checkpoint are stored; None if it is on this machine only.

    Raises ValueError if the record is damaged."""
    try:
        return read_json(checkpoint / OBJECTS_FILE, decode_shards)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{OBJECTS_FILE} cannot be read ({error})") from None


def write_shards(checkpoint: Path, records: ShardRecords) -> None:
    """Record where the shards of a checkpoint are stored."""
    replace_file(checkpoint / OBJECTS_FILE, json.dumps(records))


@dataclass
class StoredShard:
    """A shard that is read from the store by ranges."""

    url: str
    record: ShardRecord
    _last_block: tuple[int, bytes] = (-1, b"")
    """The block that was read last, with which the next range may begin."""

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from `start` up to `stop`, of blocks with correct checksums."""
        if not 0 <= start <= stop <= self.record["bytes"]:
            raise ValueError(f"{self.url} has no bytes {start} to {stop}")
        content = bytearray()
        first = start // BLOCK_BYTES
        end = -(-stop // BLOCK_BYTES)
        for group in range(first, end, BLOCKS_AT_ONCE):
            content += b"".join(self._read_blocks(range(group, min(group + BLOCKS_AT_ONCE, end))))
        return bytes(content[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES])

    def _read_blocks(self, numbers: range, retried: Callable[[BaseException], bool] = is_transient) -> list[bytes]:
        known = [self._last_block[1]] if numbers[0] == self._last_block[0] else []
        size = self.record["bytes"]
        blocks = [
            (number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, size), self.record["crc32"][number])
            for number in numbers[len(known) :]
        ]
        contents = [*known, *(read_blocks(self.url, blocks, retried) if blocks else ())]
        self._last_block = numbers[-1], contents[-1]
        return contents

    def find_damage(self, stored: StoredObject | None) -> str | None:
        """Return the problem of the shard, given its object as the store describes it now; None if it is intact.

        The object that was verified after its upload is not read again; another one is."""
        name = self.url.rpartition("/")[2]
        if stored is None:
            return f"{name} is missing in the store"
        if stored.size != self.record["bytes"]:
            return f"{name} has another size in the store"
        if stored.version == self.record["version"]:
            return None
        try:
            self.verify()
        except DamagedTransferError as error:
            return str(error)
        return None

    def verify(self, retried: Callable[[BaseException], bool] = is_transient) -> None:
        """Read the shard. Raises DamagedTransferError if a checksum is wrong."""
        numbers = range(len(self.record["crc32"]))
        for first in numbers[::BLOCKS_AT_ONCE]:
            self._read_blocks(numbers[first : first + BLOCKS_AT_ONCE], retried)


def block_checksums(file: Path) -> list[int]:
    """Return the CRC-32 of each block of a file."""
    with open(file, "rb") as content:
        return [zlib.crc32(block) for block in iter(partial(content.read, BLOCK_BYTES), b"")]


def upload_verified(file: Path, url: str) -> ShardRecord:
    """Upload a file, and return its record. The object has been compared by the store's digest, or by reading it.

    Raises DamagedTransferError if it still differs after several uploads."""
    checksums = block_checksums(file)
    size = file.stat().st_size

    def upload_once() -> ShardRecord:
        upload(file, url)
        stored = describe_object(url)
        record: ShardRecord = {"bytes": size, "version": stored.version, "crc32": checksums}
        if stored.size != size:
            raise DamagedTransferError(f"{url} has {stored.size} instead of {size} bytes after its upload")
        if stored.md5 == md5_of(file) or stored.version == multipart_md5(file):
            return record
        # Encrypted by a key of the user's, or in another store, the digest is not that of the content.
        # A wrong checksum is answered by another upload, and not by more reads.
        StoredShard(url, record).verify(is_interrupted)
        return record

    return with_retries(upload_once, url, is_damaged)


def stored_shard(checkpoint: Path, name: str) -> StoredShard:
    """Return the shard of a checkpoint in its store. Raises UserError if it is not recorded."""
    records = read_shards(checkpoint)
    if records is None or name not in records["shards"]:
        raise UserError("checkpoint", str(checkpoint), f"has no {name}", "restore it from a copy")
    return StoredShard(f"{records['url']}/{name}", records["shards"][name])


def find_shard_damage(checkpoint: Path, name: str) -> str | None:
    """Return the damage of a shard in the store, or None. Raises UserError if the store cannot be reached."""
    shard = stored_shard(checkpoint, name)
    with errors_of_store(FIELD, shard.url):
        return shard.find_damage(find_object(shard.url))


def hide_stored(checkpoint: Path) -> None:
    """Make a checkpoint incomplete in its store, if it is in one, so that no run continues from it. Its shards remain.

    Raises UserError if the store cannot be reached."""
    records = None
    with suppress(ValueError):
        records = read_shards(checkpoint)
    if records is not None:
        with errors_of_store(FIELD, records["url"]):
            remove_objects([f"{records['url']}/{CHECKSUMS_FILE}"])
