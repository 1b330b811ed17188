"""Objects are listed and read from a web server whose requests fail, and errors contain no credentials."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.data import places
from phalanx.data.object_cache import use_object_cache
from phalanx.data.places import DamagedTransferError, describe_object, download, find_object, list_objects
from phalanx.data.sources import documents, list_source_files, read_documents
from phalanx.spec.errors import UserError
from phalanx.spec.extras import EXTRA_OF_PACKAGE
from phalanx.spec.run import DataSpec
from tests.helpers.faulty_proxy import Fault, Proxy, file_server

pytest.importorskip("aiohttp")
CONTENT = b'{"text": "one"}\n{"text": "two"}\n' * 5000


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Return a web server of text.jsonl and more.jsonl."""
    monkeypatch.setattr(places, "FIRST_DELAY_SECONDS", 0.001)
    monkeypatch.setattr("phalanx.data.object_cache._default_cache", None)
    folder = tmp_path / "served"
    folder.mkdir()
    for name in ("text.jsonl", "more.jsonl"):
        (folder / name).write_bytes(CONTENT)
    with file_server(folder) as proxy:
        yield proxy


@pytest.mark.parametrize("kind", ["error", "cut", "truncated", "slow"])
def test_download_is_complete_after_transient_faults(
    kind: str, server: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "READ_SECONDS", 0.2)
    stored = describe_object(f"{server.url}/text.jsonl")
    fault = Fault(kind, "GET", times=2, seconds=0.5)
    server.plant(fault)
    download(stored, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == CONTENT
    assert fault.hits == 2


def test_download_gives_up_after_repeated_faults(server: Proxy, tmp_path: Path) -> None:
    stored = describe_object(f"{server.url}/text.jsonl")
    fault = Fault("truncated", "GET", times=1000)
    server.plant(fault)
    with pytest.raises(DamagedTransferError, match=r"bytes of http://[\d.:]+/text.jsonl arrived"):
        download(stored, tmp_path / "copy")
    assert fault.hits == places.ATTEMPTS


def test_etag_that_is_no_digest_is_replaced_by_a_second_transfer(server: Proxy, tmp_path: Path) -> None:
    stored = describe_object(f"{server.url}/text.jsonl")
    server.plant(Fault("corrupt", "GET"))
    server.requests.clear()
    download(replace(stored, md5=stored.version), tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == CONTENT
    assert sum(request.startswith("GET") for request in server.requests) == 3
    with pytest.raises(DamagedTransferError, match=r"the checksum of .* is wrong"):
        download(replace(stored, md5="0" * 32), tmp_path / "copy")


def test_refused_request_is_not_repeated(server: Proxy) -> None:
    fault = Fault("denied", times=1000)
    server.plant(fault)
    with pytest.raises(UserError, match=r"(?s)data.train = 'http.*/text.jsonl' may not be accessed.*check the cred"):
        list_objects(f"{server.url}/text.jsonl", "data.train")
    assert fault.hits <= 4  # HEAD and GET, of the object and of a folder


def test_missing_object_is_an_error_of_its_field(server: Proxy) -> None:
    assert find_object(f"{server.url}/none.txt") is None
    with pytest.raises(UserError, match=r"data.train = 'http.*/none.txt' does not exist\n  fix: correct the URL"):
        list_objects(f"{server.url}/none.txt", "data.train")


def test_unreachable_server_is_an_error_of_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "FIRST_DELAY_SECONDS", 0.001)
    with pytest.raises(UserError, match=r"(?s)data.train = 'http://127.0.0.1:9/x' cannot be accessed.*check the net"):
        list_objects("http://127.0.0.1:9/x", "data.train")


def test_missing_package_is_an_error_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(places.PACKAGES, "s3", "package_that_does_not_exist")
    monkeypatch.setitem(EXTRA_OF_PACKAGE, "package_that_does_not_exist", "cloud")
    with pytest.raises(UserError, match=r"requires package_that_does_not_exist.*\n  fix: .*pip install '\.\[cloud\]'"):
        list_objects("s3://bucket/text.txt", "data.train")


def test_documents_of_url_equal_those_of_local_file(server: Proxy, tmp_path: Path) -> None:
    use_object_cache(DataSpec(cache=str(tmp_path / "cache")))
    local = [document.text for document in documents([str(tmp_path / "served" / "text.jsonl")])]
    fetched = list(documents([f"{server.url}/text.jsonl", f"{server.url}/more.jsonl"]))
    assert [document.text for document in fetched] == 2 * local
    assert fetched[0].name == "text.jsonl:1"
    gets = [request for request in server.requests if request.startswith("GET")]
    list(documents([f"{server.url}/text.jsonl"]))
    assert [request for request in server.requests if request.startswith("GET")] == gets


def test_error_of_a_record_names_its_url(server: Proxy, tmp_path: Path) -> None:
    use_object_cache(DataSpec(cache=str(tmp_path / "cache")))
    (tmp_path / "served" / "bad.jsonl").write_bytes(b'{"text": "one"}\n{"text": \n')
    with pytest.raises(UserError, match=rf"data.train = '{server.url}/bad.jsonl:2' is not valid JSON"):
        list(documents([f"{server.url}/bad.jsonl"]))


def test_object_that_changed_since_it_was_listed_is_refused(server: Proxy, tmp_path: Path) -> None:
    use_object_cache(DataSpec(cache=str(tmp_path / "cache")))
    source_files = list_source_files([f"{server.url}/text.jsonl"])
    (tmp_path / "served" / "text.jsonl").write_bytes(CONTENT + CONTENT)
    new_time = time.time() + 10
    os.utime(tmp_path / "served" / "text.jsonl", (new_time, new_time))
    with pytest.raises(UserError, match=r"text\.jsonl' has changed since it was listed"):
        list(read_documents(source_files[0]))


def test_next_object_is_read_while_one_is_processed(server: Proxy, tmp_path: Path) -> None:
    use_object_cache(DataSpec(cache=str(tmp_path / "cache")))
    iterator = documents([f"{server.url}/text.jsonl", f"{server.url}/more.jsonl"])
    next(iterator)
    deadline = time.monotonic() + 20
    while not any(request == "GET /more.jsonl" for request in server.requests):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for thread in threading.enumerate():
        if thread.name == "phalanx-read-ahead":
            thread.join(20)
    iterator.close()


def test_texts_hide_credentials() -> None:
    error = ValueError("GET https://user:secret@host/a?X-Amz-Signature=secret failed at s3://bucket/a")
    assert places.describe_error(error) == "GET https://host/a failed at s3://bucket/a"
