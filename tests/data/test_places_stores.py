"""Each object store is written, listed, read by ranges and removed from, on a local server of its protocol."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx.data import places
from phalanx.data.object_cache import use_object_cache
from phalanx.data.places import (
    download,
    find_object,
    list_below,
    list_objects,
    read_blocks,
    remove_objects,
    upload,
    write_object,
)
from phalanx.data.sources import documents
from phalanx.runs.stored_shards import BLOCK_BYTES, StoredShard, block_checksums, upload_verified
from phalanx.spec.errors import UserError
from phalanx.spec.run import DataSpec
from phalanx.testing.processes import wait_until

AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The key of every Azurite, from its documentation."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def s3_bucket() -> Iterator[str]:
    pytest.importorskip("moto", reason="moto is not installed: make test-cloud")
    from tests.helpers.s3_server import make_bucket, s3_server

    with s3_server():
        yield make_bucket("bucket")


@contextmanager
def gcs_bucket() -> Iterator[str]:
    pytest.importorskip("gcsfs", reason="gcsfs is not installed: make test-cloud")
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason="no emulator of GCS: make test-cloud")
    port = free_port()
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    os.environ["STORAGE_EMULATOR_HOST"] = f"http://127.0.0.1:{port}"
    try:
        yield "gs://bucket"
    finally:
        server.stop()


@contextmanager
def azure_container() -> Iterator[str]:
    pytest.importorskip("adlfs", reason="adlfs is not installed: make test-cloud")
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite-blob is not on the PATH: npm install -g azurite")
    from azure.storage.blob import BlobServiceClient

    port = free_port()
    command = [program, "--inMemoryPersistence", "--blobPort", str(port), "--skipApiVersionCheck", "--disableTelemetry"]
    address = f"BlobEndpoint=http://127.0.0.1:{port}/devstoreaccount1"
    connection = f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={AZURITE_KEY};{address};"
    os.environ["AZURE_STORAGE_CONNECTION_STRING"] = connection
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: not socket.socket().connect_ex(("127.0.0.1", port)), "azurite", 60)
            BlobServiceClient.from_connection_string(connection).create_container("bucket")
            yield "az://bucket"
        finally:
            process.kill()


BUCKETS = {"s3": s3_bucket, "gs": gcs_bucket, "az": azure_container}


@pytest.fixture(scope="module", params=BUCKETS)
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the URL of a bucket of each kind of store."""
    variables = ("AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST", "AZURE_STORAGE_CONNECTION_STRING")
    before = {name: os.environ.pop(name, None) for name in variables}
    with BUCKETS[request.param]() as url:
        yield url
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture
def bucket(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of an empty folder of a bucket."""
    monkeypatch.setattr(places, "FIRST_DELAY_SECONDS", 0.001)
    return f"{server}/{tmp_path.name}"


def test_object_is_written_listed_read_and_removed(bucket: str, tmp_path: Path) -> None:
    file = tmp_path / "file.safetensors"
    file.write_bytes(os.urandom(2 * BLOCK_BYTES + 17))
    content = file.read_bytes()
    url = f"{bucket}/team/run/step-00000001/file.safetensors"
    record = upload_verified(file, url)
    shard = StoredShard(url, record)
    assert shard.read(5, len(content) - 3) == content[5:-3]
    assert shard.find_damage(find_object(url)) is None
    assert [entry.name for entry in list_below(f"{bucket}/team/run")] == ["step-00000001/file.safetensors"]
    for source in (url, f"{bucket}/team/run", f"{bucket}/team/*/*/*.safetensors"):
        (entry,) = list_objects(source, "data.train")
        download(entry, tmp_path / "copy")
        assert (entry.url, (tmp_path / "copy").read_bytes()) == (url, content)

    file.write_bytes(content[::-1])
    upload(file, url)
    damage = shard.find_damage(find_object(url))
    assert damage is not None
    assert "wrong checksum" in damage
    assert read_blocks(url, [(0, BLOCK_BYTES, block_checksums(file)[0])]) == [content[::-1][:BLOCK_BYTES]]
    remove_objects([url, f"{bucket}/none"])
    assert find_object(url) is None
    assert list_below(f"{bucket}/team/run") == []


def test_large_object_is_uploaded_in_parts(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "PART_BYTES", 5 * 2**20)
    file = tmp_path / "file"
    file.write_bytes(os.urandom(12 * 2**20))
    record = upload_verified(file, f"{bucket}/large")
    assert StoredShard(f"{bucket}/large", record).read(0, record["bytes"]) == file.read_bytes()


def test_documents_are_read_from_store(bucket: str, tmp_path: Path) -> None:
    use_object_cache(DataSpec(cache=str(tmp_path / "cache")))
    for name in ("b", "a", ".hidden"):
        (tmp_path / name).write_text(f'{{"text": "{name}"}}\n')
        upload(tmp_path / name, f"{bucket}/text/{name}.jsonl")
    for folder in ("text/", "text/sub/"):
        write_object(f"{bucket}/{folder}", b"")
    for source in (f"{bucket}/text", f"{bucket}/text/*.jsonl"):
        assert [document.text for document in documents([source])] == ["a", "b"]
    with pytest.raises(UserError, match=r"data.train = '.*/none' does not exist"):
        list(documents([f"{bucket}/none"]))
