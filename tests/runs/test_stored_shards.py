"""The record of shards in an object store: damage is described, and names lead nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.data import places
from phalanx.data.places import DamagedTransferError, StoredObject
from phalanx.runs import stored_shards
from phalanx.runs.checkpoints import find_damage, read_checksums
from phalanx.runs.stored_shards import (
    BLOCK_BYTES,
    OBJECTS_FILE,
    StoredShard,
    block_checksums,
    hide_stored,
    read_shards,
    upload_verified,
    write_shards,
)

SHARD = {"bytes": 10, "version": "a", "crc32": [1]}
RECORDS: dict[str, Any] = {"url": "s3://bucket/run/step-00000001", "shards": {"shard-1.safetensors": SHARD}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a checkpoint whose only shard is in a store."""
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  shard-1.safetensors\n")
    (tmp_path / OBJECTS_FILE).write_text(json.dumps(RECORDS))
    return tmp_path


def test_shards_of_store_belong_to_checkpoint(checkpoint: Path) -> None:
    assert read_shards(checkpoint) == RECORDS
    assert read_checksums(checkpoint) == {"shard-1.safetensors": "0" * 64}


def test_checkpoint_without_record_is_on_this_machine(tmp_path: Path) -> None:
    assert read_shards(tmp_path) is None
    hide_stored(tmp_path)


@pytest.mark.parametrize(
    "records",
    [
        {"url": RECORDS["url"]},
        {**RECORDS, "url": "file:///etc"},
        {**RECORDS, "url": "https://user:secret@host/x"},
        {**RECORDS, "shards": {"../../other.safetensors": SHARD}},
        {**RECORDS, "shards": {"/etc/passwd": SHARD}},
        {**RECORDS, "shards": {"shard-1.safetensors": {**SHARD, "bytes": BLOCK_BYTES + 1}}},
        {**RECORDS, "shards": {"shard-1.safetensors": {**SHARD, "bytes": -1}}},
        [1, 2],
    ],
    ids=["no shards", "local url", "credentials", "parent", "absolute", "too few checksums", "negative", "list"],
)
def test_damaged_record_is_damage_of_checkpoint(records: Any, checkpoint: Path) -> None:
    (checkpoint / OBJECTS_FILE).write_text(json.dumps(records))
    damage = find_damage(checkpoint)
    assert damage is not None
    assert damage.startswith("objects.json cannot be read")
    assert "secret" not in damage
    hide_stored(checkpoint)


def test_record_is_written_and_read(tmp_path: Path) -> None:
    write_shards(tmp_path, RECORDS)  # type: ignore[arg-type]
    assert read_shards(tmp_path) == RECORDS


def test_range_outside_of_shard_is_refused() -> None:
    with pytest.raises(ValueError, match="has no bytes 5 to 11"):
        StoredShard(RECORDS["url"], SHARD).read(5, 11)  # type: ignore[arg-type]


def test_each_block_has_a_checksum(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(2 * BLOCK_BYTES + 1))
    assert len(block_checksums(file)) == 3
    file.write_bytes(b"")
    assert block_checksums(file) == []


class WrongStore:
    """A store whose objects have another content than was written."""

    num_reads = 0

    def cat_ranges(self, urls: list[str], *_: Any, **__: Any) -> list[bytes]:
        return [self.cat_file() for _ in urls]

    def cat_file(self, *_: Any, **__: Any) -> bytes:
        self.num_reads += 1
        return b"wrong"


def test_damaged_upload_is_repeated_without_repeated_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = WrongStore()
    uploads: list[str] = []
    monkeypatch.setattr(places, "FIRST_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(places, "file_system", lambda _: store)
    monkeypatch.setattr(stored_shards, "upload", lambda _, url: uploads.append(url))
    monkeypatch.setattr(
        stored_shards, "describe_object", lambda url: StoredObject(url=url, name="shard", size=5, version="1")
    )
    (tmp_path / "shard").write_bytes(b"right")
    with pytest.raises(DamagedTransferError):
        upload_verified(tmp_path / "shard", "s3://bucket/shard")
    assert len(uploads) == places.ATTEMPTS
    assert store.num_reads == 2 * places.ATTEMPTS
