"""Local copies of objects, in a directory of bounded size that processes share.

    objects/KEY/NAME    a complete object, or the files of a pair; KEY is a hash of URLs and versions
    objects/KEY.lock    locked exclusively while one process downloads, and shared while others read

A copy is written under another name, and renamed when its size and checksum are correct. Before a download, the copies
that were used least recently and that no process reads are removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from phalanx.data.places import StoredObject, describe_object, download, errors_of_store
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import format_gb_or_mb
from phalanx.spec.run import DataSpec

logger = logging.getLogger(__name__)

STALLED_SECONDS = 300
"""Seconds without progress after which a process no longer waits for the download of another."""


@dataclass(frozen=True)
class ObjectCache:
    """A directory of copies, and its limit."""

    directory: Path
    max_bytes: int

    @contextmanager
    def reading(self, objects: Sequence[StoredObject], field: str) -> Iterator[Path]:
        """Yield the folder with copies of objects, which are not removed meanwhile.

        Objects that are not there are downloaded. Raises UserError if they cannot be read, have changed since they were
        listed, or are larger than the cache."""
        lock = self._lock_copies(objects, field)
        try:
            yield self._folder(objects)
        finally:
            lock.close()

    def hold(self, objects: Sequence[StoredObject], field: str) -> Path:
        """Return the folder with copies of objects, which are not removed until this process ends."""
        folder = self._folder(objects)
        if folder not in _held:
            _held[folder] = self._lock_copies(objects, field)
        return folder

    def _folder(self, objects: Sequence[StoredObject]) -> Path:
        key = json.dumps([(entry.url, entry.size, entry.version) for entry in objects])
        return self.directory / "objects" / hashlib.sha256(key.encode()).hexdigest()[:32]

    def _lock_copies(self, objects: Sequence[StoredObject], field: str) -> IO[bytes]:
        """Return the shared lock of complete copies."""
        folder = self._folder(objects)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            while True:
                lock = open(_lock_file(folder), "ab")  # noqa: SIM115 -- the caller closes it
                try:
                    if not folder.is_dir():
                        _wait_for_lock(lock, fcntl.LOCK_EX, objects[0].url, field)
                        # Another process may have removed the lock, and a third may be downloading under a new one.
                        if not folder.is_dir() and _is_current(lock):
                            self._download(objects, folder, lock, field)
                    _wait_for_lock(lock, fcntl.LOCK_SH, objects[0].url, field)
                    # Another process may have removed the copies, and the lock, before they were locked.
                    if folder.is_dir() and _is_current(lock):
                        os.utime(lock.name)
                        return lock
                except BaseException:
                    lock.close()
                    raise
                lock.close()
        except OSError as error:
            problem = f"cannot store objects: {error.strerror or error}"
            raise UserError("data.cache", str(self.directory), problem, "use another directory") from None

    def _download(self, objects: Sequence[StoredObject], folder: Path, lock: IO[bytes], field: str) -> None:
        partial = folder.with_name(f"{folder.name}.{os.getpid()}.{threading.get_ident()}.partial")
        files = [partial / Path(entry.name).name for entry in objects]
        needed_bytes = sum(entry.size or 0 for entry in objects)
        try:
            # Files have their size from the beginning, so that other processes leave room for them.
            with open(folder.with_name("room.lock"), "ab") as room:
                _wait_for_lock(room, fcntl.LOCK_EX, objects[0].url, field)
                for interrupted in folder.parent.glob(f"{folder.name}.*.partial"):
                    shutil.rmtree(interrupted, ignore_errors=True)
                self._make_room(needed_bytes, objects[0].url, field)
                partial.mkdir()
                for file, entry in zip(files, objects, strict=True):
                    file.touch()
                    os.truncate(file, entry.size or 0)
            for file, entry in zip(files, objects, strict=True):
                with errors_of_store(field, entry.url):
                    if describe_object(entry.url).version != entry.version:
                        fix = "start the run again; objects that a run reads must stay the same"
                        raise UserError(field, entry.url, "has changed since it was listed", fix)
                    download(entry, file, lambda: os.utime(lock.name))
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _make_room(self, needed_bytes: int, url: str, field: str) -> None:
        """Remove copies that no process reads, least recently used first, until a new one fits."""
        if needed_bytes > self.max_bytes:
            problem = f"has {format_gb_or_mb(needed_bytes)}, more than the cache of objects may have"
            fix = f"set data.cache_max_bytes to at least {needed_bytes}"
            raise UserError(field, url, problem, fix)
        sizes = {path: folder_bytes(path) for path in (self.directory / "objects").iterdir() if path.is_dir()}
        excess = sum(sizes.values()) + needed_bytes - self.max_bytes
        for folder in sorted(sizes, key=_last_use):
            if excess <= 0:
                return
            if remove_unused(folder):
                logger.debug("removed the copies in %s to make room", folder)
                excess -= sizes[folder]
        if excess > 0:
            text = "copies of objects exceed data.cache_max_bytes by %s, because all of them are in use"
            logger.warning(text, format_gb_or_mb(excess))


_held: dict[Path, IO[bytes]] = {}
"""Locks of copies that this process uses until it ends."""
_default_cache: ObjectCache | None = None


def use_object_cache(data: DataSpec) -> None:
    """Select the directory and the limit of copies for this process."""
    global _default_cache
    _default_cache = ObjectCache(Path(data.cache).expanduser(), data.cache_max_bytes)


def object_cache() -> ObjectCache:
    """Return the cache of this process, by default that of a run without settings."""
    if _default_cache is None:
        use_object_cache(DataSpec())
    assert _default_cache is not None
    return _default_cache


def folder_bytes(folder: Path) -> int:
    """Return the bytes of the files in a folder, some of which may disappear meanwhile."""
    total = 0
    for file in folder.iterdir():
        with suppress(OSError):
            total += file.stat().st_size
    return total


def remove_unused(folder: Path) -> bool:
    """Remove copies, or the rest of a download, unless a process uses them; return whether they were removed."""
    with open(_lock_file(folder), "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # Another process may have removed the lock, and a third may hold a new one.
        if not _is_current(lock):
            return False
        shutil.rmtree(folder, ignore_errors=True)
        Path(lock.name).unlink(missing_ok=True)
    return True


def _lock_file(folder: Path) -> Path:
    """Return the lock of a folder with copies, or of an unfinished one."""
    return folder.with_name(f"{folder.name.partition('.')[0]}.lock")


def _is_current(lock: IO[bytes]) -> bool:
    """Return whether an opened lock is still the file of its name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(lock.fileno()), os.stat(lock.name))
    return False


def _last_use(folder: Path) -> float:
    with suppress(OSError):
        return _lock_file(folder).stat().st_mtime
    return 0.0


def _wait_for_lock(lock: IO[bytes], kind: int, url: str, field: str) -> None:
    """Wait for a lock while another process downloads. Raises UserError if that makes no progress for long."""
    waits_since = time.time()
    while True:
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.time() - max(waits_since, os.fstat(lock.fileno()).st_mtime) > STALLED_SECONDS:
                problem = f"is being downloaded by another process, without progress for {STALLED_SECONDS} s"
                raise UserError(field, url, problem, f"stop the process that locks {lock.name}") from None
        time.sleep(0.05)


def read_ahead(objects: Iterable[StoredObject | None], field: str) -> Iterator[None]:
    """Yield once per object, while a thread copies the next object to the cache; None is a local file.

    An error in the thread is left to the reader of the object, which meets it again."""
    cache = object_cache()

    def copy(entry: StoredObject) -> None:
        with suppress(UserError), cache.reading([entry], field):
            pass

    pending = list(objects)
    for following in [*pending[1:], None]:
        if following is not None:
            threading.Thread(target=copy, args=(following,), name="phalanx-read-ahead", daemon=True).start()
        yield
