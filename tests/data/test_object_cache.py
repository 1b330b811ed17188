"""Processes share copies of objects: one downloads, the others wait, and the size of all copies is bounded."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import pytest

from phalanx.data import object_cache, places
from phalanx.data.object_cache import ObjectCache, folder_bytes
from phalanx.data.places import StoredObject, list_objects
from phalanx.spec.errors import UserError
from tests.helpers.faulty_proxy import Fault, Proxy, file_server

pytest.importorskip("aiohttp")
SIZE = 50_000


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Return a web server of five objects."""
    monkeypatch.setattr(places, "FIRST_DELAY_SECONDS", 0.001)
    (tmp_path / "served").mkdir()
    for number in range(5):
        (tmp_path / "served" / f"{number}.txt").write_bytes(bytes([number]) * SIZE)
    with file_server(tmp_path / "served") as proxy:
        yield proxy


@pytest.fixture
def cache(tmp_path: Path) -> ObjectCache:
    """Return a cache with room for three of the objects."""
    return ObjectCache(tmp_path / "cache", 3 * SIZE + 100)


def describe(server: Proxy, number: int) -> list[StoredObject]:
    return list_objects(f"{server.url}/{number}.txt", "data.train")


def read(cache: ObjectCache, objects: list[StoredObject]) -> bytes:
    with cache.reading(objects, "data.train") as folder:
        return (folder / objects[0].name).read_bytes()


def folders(cache: ObjectCache) -> list[Path]:
    return [path for path in (cache.directory / "objects").iterdir() if path.is_dir()]


def test_least_recently_used_copies_are_removed(server: Proxy, cache: ObjectCache) -> None:
    for number in (0, 1, 2, 0, 3, 4):
        assert read(cache, describe(server, number)) == bytes([number]) * SIZE
        assert sum(map(folder_bytes, folders(cache))) <= cache.max_bytes
        time.sleep(0.02)  # times of use differ
    server.requests.clear()
    read(cache, describe(server, 0))
    assert not [request for request in server.requests if request.startswith("GET")]


def test_copies_in_use_are_not_removed(server: Proxy, cache: ObjectCache) -> None:
    held = cache.hold(describe(server, 0), "data.train")
    with cache.reading(describe(server, 1), "data.train") as reading:
        for number in (2, 3, 4):
            read(cache, describe(server, number))
        assert held.is_dir()
        assert reading.is_dir()
    object_cache._held.pop(held).close()


def test_copies_in_use_may_exceed_the_limit(
    server: Proxy, cache: ObjectCache, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        for number in range(4):
            stack.enter_context(cache.reading(describe(server, number), "data.train"))
        assert "exceed data.cache_max_bytes by 0.0 MB, because all of them are in use" in caplog.text
    read(cache, describe(server, 4))
    assert sum(map(folder_bytes, folders(cache))) <= cache.max_bytes


def test_object_larger_than_cache_is_refused(server: Proxy, tmp_path: Path) -> None:
    small = ObjectCache(tmp_path / "cache", SIZE - 1)
    with pytest.raises(
        UserError, match=rf"(?s)0\.txt' has 0.1 MB, more than .*set data.cache_max_bytes to at least {SIZE}"
    ):
        read(small, describe(server, 0))
    assert folders(small) == []


def read_and_report(cache: ObjectCache, objects: list[StoredObject], results: multiprocessing.Queue) -> None:
    results.put(read(cache, objects) == bytes([0]) * SIZE)


def test_one_process_downloads_and_others_wait(server: Proxy, cache: ObjectCache) -> None:
    objects = describe(server, 0)
    server.requests.clear()
    server.plant(Fault("slow", "GET", seconds=0.3))
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=read_and_report, args=(cache, objects, results)) for _ in range(2)]
    for process in processes:
        process.start()
    assert [results.get(timeout=60) for _ in processes] == [True, True]
    for process in processes:
        process.join(60)
    assert [request for request in server.requests if request.startswith("GET")] == ["GET /0.txt"]


def test_download_of_killed_process_is_repeated(server: Proxy, cache: ObjectCache) -> None:
    objects = describe(server, 0)
    server.plant(Fault("slow", "GET", seconds=60))
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=read, args=(cache, objects))
    process.start()
    deadline = time.monotonic() + 60
    while not any(request.startswith("GET") for request in server.requests):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert [folder.suffix for folder in folders(cache)] == [".partial"]
    assert read(cache, objects) == bytes([0]) * SIZE
    assert [folder.suffix for folder in folders(cache)] == [""]


def test_waiting_ends_when_other_process_makes_no_progress(
    server: Proxy, cache: ObjectCache, monkeypatch: pytest.MonkeyPatch
) -> None:

    objects = describe(server, 0)
    folder = cache._folder(objects)
    folder.parent.mkdir(parents=True)
    monkeypatch.setattr(object_cache, "STALLED_SECONDS", 0.1)
    with open(object_cache._lock_file(folder), "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="is being downloaded by another process, without progress"):
            read(cache, objects)


def test_removed_lock_is_opened_again(server: Proxy, cache: ObjectCache, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = describe(server, 0)
    wait_for_lock, download = object_cache._wait_for_lock, ObjectCache._download
    downloads_with_current_lock = []

    def remove_lock_and_wait(lock: IO[bytes], *arguments: Any) -> None:
        if arguments[0] == fcntl.LOCK_EX:
            monkeypatch.setattr(object_cache, "_wait_for_lock", wait_for_lock)
            os.unlink(lock.name)
        wait_for_lock(lock, *arguments)

    def record_download(cache: ObjectCache, objects: Any, folder: Path, lock: IO[bytes], field: str) -> None:
        downloads_with_current_lock.append(object_cache._is_current(lock))
        download(cache, objects, folder, lock, field)

    monkeypatch.setattr(object_cache, "_wait_for_lock", remove_lock_and_wait)
    monkeypatch.setattr(ObjectCache, "_download", record_download)
    assert read(cache, objects) == bytes([0]) * SIZE
    assert downloads_with_current_lock == [True]


def test_copies_behind_a_newer_lock_are_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "key"
    folder.mkdir()
    lock_now = fcntl.flock

    def replace_and_lock(lock: IO[bytes], kind: int) -> None:
        os.unlink(lock.name)
        Path(lock.name).touch()
        lock_now(lock, kind)

    monkeypatch.setattr(fcntl, "flock", replace_and_lock)
    assert not object_cache.remove_unused(folder)
    assert folder.exists()
