"""Objects in stores and on web servers, by URL: list, read a range, write, remove.

All of it is fsspec's, which is imported when a URL is used. Credentials come from the environment (`STORES`); no text
that leaves this module contains them. Failures that may pass are retried with exponential backoff.
"""

from __future__ import annotations

import base64
import glob
import hashlib
import importlib
import logging
import random
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from phalanx.spec.errors import UserError
from phalanx.spec.extras import missing_package
from phalanx.spec.local_paths import READABLE, hide_credentials

logger = logging.getLogger(__name__)
T = TypeVar("T")

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "http": "aiohttp", "https": "aiohttp", "hf": "huggingface_hub"}
"""Packages through which fsspec reads each scheme."""
ATTEMPTS = 7
FIRST_DELAY_SECONDS = 0.5
"""Delay before the second attempt; each later one is twice the one before, and a random part of up to a half. All
together are about 40 s."""
CONNECT_SECONDS = 10
READ_SECONDS = 60
"""Seconds without a byte after which a request is repeated."""
PART_BYTES = 32 * 2**20
"""Size of the parts in which files are downloaded, and in which S3 receives large ones."""
TRANSIENT_STATUSES = (408, 425, 429)
PERMANENT_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError, UserError)
"""Errors of a request that fails again if it is repeated."""

CONNECTION_ERROR = re.compile("connect|timed? ?out|payload|incomplete|httpclient|stream|servicere", re.IGNORECASE)
"""Names of errors of connections, which are not OSErrors in all packages."""


class DamagedTransferError(OSError):
    """An object arrived shorter than it is, or with another content."""


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """An object, as its store lists it."""

    url: str
    name: str
    """Path relative to the folder that was listed, or the last part of the URL."""
    size: int | None
    """Bytes; None if a web server does not tell."""
    version: str
    """Text that changes with the content (ETag or time); "" if the store tells neither."""
    md5: str | None = None
    """Digest of the content in hexadecimal text, if the store tells one. On S3 it is the ETag, if that may be one."""


@contextmanager
def errors_of_store(field: str, url: str) -> Iterator[None]:
    """Raise UserError, reported under `field`, for any failure of a store."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except Exception as error:  # each package has its own errors
        raise store_error(field, url, error) from None


def store_error(field: str, url: str, error: BaseException) -> UserError:
    """Return the error for a failure of a store."""
    scheme = url.partition("://")[0]
    error = _origin(error)
    if isinstance(error, ImportError):
        return missing_package(field, url, PACKAGES[scheme])
    if isinstance(error, FileNotFoundError):
        return UserError(field, url, "does not exist", "correct the URL; buckets are not created")
    variables = f": set {READABLE[scheme]}" if READABLE[scheme] else ""
    reason = describe_error(error)
    if isinstance(error, PermissionError) or _status(error) in (401, 403) or re.search("credential", reason, re.I):
        fix = f"check the credentials in the environment{variables}, and the permissions of the bucket"
        return UserError(field, url, f"may not be accessed: {reason}", fix)
    return UserError(field, url, f"cannot be accessed: {reason}", f"check the network and the environment{variables}")


def describe_error(error: BaseException) -> str:
    """Return the message of a store's error in one line, without credentials."""
    text = " ".join(str(error).split()) or type(error).__name__
    return hide_credentials(text)[:300]


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of an error, if it has one."""
    values = (getattr(error, name, None) for name in ("status", "status_code", "code"))
    return next((int(value) for value in values if str(value).isdecimal()), None)  # type: ignore[arg-type]


def _origin(error: BaseException) -> BaseException:
    """Return the failure of a request to a web server that fsspec reports as a missing file."""
    cause = error.__cause__
    is_hidden = isinstance(error, FileNotFoundError) and type(cause).__module__.startswith("aiohttp")
    return cause if is_hidden and cause is not None and _status(cause) != 404 else error


def is_transient(error: BaseException) -> bool:
    """Return whether a request that failed with this error may succeed if it is repeated."""
    error = _origin(error)
    if isinstance(error, PERMANENT_ERRORS) or not isinstance(error, Exception):
        return False
    if (status := _status(error)) is not None:
        return status >= 500 or status in TRANSIENT_STATUSES
    # Errors of a package about its arguments or missing credentials; those of connections are OSErrors, or named so.
    return isinstance(error, OSError) or CONNECTION_ERROR.search(type(error).__name__) is not None


def is_damaged(error: BaseException) -> bool:
    """Return whether a transfer was incomplete, or its content differs."""
    return isinstance(error, DamagedTransferError)


def is_interrupted(error: BaseException) -> bool:
    """Return whether a request failed on its way, and may succeed if it is repeated."""
    return is_transient(error) and not is_damaged(error)


def with_retries(request: Callable[[], T], url: str, retried: Callable[[BaseException], bool] = is_transient) -> T:
    """Return the result of a request, repeated with exponential backoff after the errors that are to be `retried`."""
    for attempt in range(1, ATTEMPTS):
        try:
            return request()
        except Exception as error:
            if not retried(error):
                raise
            delay = FIRST_DELAY_SECONDS * 2 ** (attempt - 1) * random.uniform(1, 1.5)
            logger.debug("%s: %s; attempt %d follows in %.1f s", url, describe_error(error), attempt + 1, delay)
            time.sleep(delay)
    return request()


def file_system(url: str) -> Any:
    """Return the fsspec file system of a URL. Raises ImportError if its package is not installed."""
    scheme = url.partition("://")[0]
    importlib.import_module(PACKAGES[scheme])
    fsspec = importlib.import_module("fsspec")
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme == "s3":
        # `with_retries` is the only place that repeats a request.
        limits = {"connect_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS}
        options["config_kwargs"] = {**limits, "retries": {"total_max_attempts": 1}}
    elif scheme in ("http", "https"):
        aiohttp = importlib.import_module("aiohttp")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
        options["client_kwargs"] = {"timeout": timeout}
    elif scheme == "hf":
        options = {}
    system = fsspec.filesystem(scheme, **options)
    if scheme == "s3":
        system.retries = 1
    return system


def list_objects(source: str, field: str) -> list[StoredObject]:
    """Return the objects of a URL, by name: of an object itself, of all below a folder, or those that a glob matches.

    Hidden ones are left out, as in a local directory. Raises UserError if there are none."""
    with errors_of_store(field, source):
        found = with_retries(lambda: _find(source), source)
    if not found:
        problem = "matches no object" if glob.has_magic(source) else "does not exist"
        if not glob.has_magic(source) and not source.startswith("http"):
            problem += ", or has hidden objects only"
        raise UserError(field, source, problem, "correct the URL")
    return found


def list_below(folder: str) -> list[StoredObject]:
    """Return all objects below a folder of a store, none if there is no such folder."""

    def find() -> list[StoredObject]:
        infos = file_system(folder).find(folder, detail=True).values()
        scheme, _, path = folder.partition("://")
        names = {str(info["name"]).removeprefix(f"{path}/"): info for info in infos if info["type"] == "file"}
        return [_describe(info, f"{scheme}://{path}/{name}", name) for name, info in sorted(names.items())]

    return with_retries(find, folder)


def _find(source: str) -> list[StoredObject]:
    system = file_system(source)
    scheme = source.partition("://")[0]
    if glob.has_magic(source):
        parts = source.split("/")
        root = "/".join(takewhile(lambda part: not glob.has_magic(part), parts))
        infos = system.glob(source, detail=True).values()
    else:
        root = source.rstrip("/")
        info = None
        if not source.endswith("/"):
            try:
                info = system.info(source)
            except FileNotFoundError as error:
                if _origin(error) is not error:
                    raise
        if info is not None and info["type"] == "file":
            return [_describe(info, source, root.rpartition("/")[2])]
        infos = system.find(source, detail=True).values()
    found = []
    for info in infos:
        path = str(info["name"])
        url = path if "://" in path else f"{scheme}://{path}"
        relative = url.removeprefix(f"{root}/")
        is_hidden = any(part.startswith(".") for part in relative.split("/"))
        # Consoles of stores make a folder by an empty object whose name ends with a slash.
        is_folder = info["type"] != "file" or relative == "" or relative.endswith("/")
        if not is_folder and not is_hidden:
            # The listing of a web server has names only.
            found.append(_describe(info if info.get("size") is not None else system.info(url), url, relative))
    return sorted(found, key=lambda entry: entry.name)


def _describe(info: Mapping[str, Any], url: str, name: str) -> StoredObject:
    tags = [info.get(key) for key in ("ETag", "etag", "blob_id", "generation")]
    times = [info.get(key) for key in ("LastModified", "Last-Modified", "last_modified", "updated", "mtime")]
    version = str(next((value for value in (*tags, *times) if value), "")).strip('"')
    encoded = info.get("md5Hash") or (info.get("content_settings") or {}).get("content_md5")
    md5 = None
    if encoded:
        md5 = (base64.b64decode(encoded) if isinstance(encoded, str) else bytes(encoded)).hex()
    elif url.startswith("s3://") and re.fullmatch("[0-9a-f]{32}", version):
        # Of an object that was written in one part.
        md5 = version
    size = info.get("size")
    return StoredObject(url=url, name=name, size=None if size is None else int(size), version=version, md5=md5)


def describe_object(url: str) -> StoredObject:
    """Return the current state of an object. Raises the store's error, FileNotFoundError if there is none."""
    return with_retries(lambda: _describe(file_system(url).info(url), url, url.rpartition("/")[2]), url)


def find_object(url: str) -> StoredObject | None:
    """Return the current state of an object; None if there is none, or the store does not tell without permission."""
    try:
        return describe_object(url)
    except (FileNotFoundError, PermissionError) as error:
        if _origin(error) is not error:
            raise
        return None


def read_range(
    url: str,
    start: int,
    stop: int,
    crc32: int | None = None,
    retried: Callable[[BaseException], bool] = is_transient,
) -> bytes:
    """Return the bytes of an object from `start` up to `stop`, which have the checksum if one is given."""

    def read() -> bytes:
        content = _read_content(url, start=start, end=stop)
        if len(content) != stop - start:
            raise DamagedTransferError(f"{len(content):,} of {stop - start:,} bytes of {url} arrived")
        if crc32 is not None and zlib.crc32(content) != crc32:
            raise DamagedTransferError(f"bytes {start:,} to {stop:,} of {url} have a wrong checksum")
        return content

    return with_retries(read, url, retried) if stop > start else b""


def read_blocks(
    url: str, blocks: Sequence[tuple[int, int, int]], retried: Callable[[BaseException], bool] = is_transient
) -> list[bytes]:
    """Return several ranges of an object, read at the same time: their starts, stops and CRC-32 are given."""
    starts, stops, _ = zip(*blocks, strict=True)
    contents = file_system(url).cat_ranges([url] * len(blocks), list(starts), list(stops), on_error="return")
    return [
        content
        if isinstance(content, bytes) and len(content) == stop - start and zlib.crc32(content) == crc32
        else read_range(url, start, stop, crc32, retried)
        for content, (start, stop, crc32) in zip(contents, blocks, strict=True)
    ]


def read_object(url: str) -> bytes:
    """Return the content of a small object."""
    return with_retries(lambda: _read_content(url), url)


def _read_content(url: str, **limits: int) -> bytes:
    try:
        content: bytes = file_system(url).cat_file(url, **limits)
    except Exception as error:
        # botocore compares content with a checksum that the store sends.
        if "checksum" in type(error).__name__.lower():
            raise DamagedTransferError(f"{url} has a wrong checksum") from error
        raise
    return content


def download(stored: StoredObject, file: Path, progress: Callable[[], None] = lambda: None) -> None:
    """Write an object to a new local file, and compare its size and digest. `progress` is called after each part.

    Raises DamagedTransferError if they differ, or the object changed meanwhile."""
    digests: set[str] = set()

    def has_digest() -> bool:
        digest = md5_of(file)
        # The ETag of an encrypted object looks like a digest and is none. Two transfers must then be equal.
        is_repeated = stored.md5 == stored.version and digest in digests
        digests.add(digest)
        return is_repeated or digest == stored.md5

    def download_once() -> None:
        # A web server may have no ranges.
        if stored.size is None or stored.url.startswith("http"):
            callbacks = importlib.import_module("fsspec.callbacks")
            callback = callbacks.Callback(hooks={"progress": lambda *_, **__: progress()})
            with_retries(lambda: file_system(stored.url).get_file(stored.url, str(file), callback=callback), stored.url)
        else:
            with open(file, "wb") as output:
                for start in range(0, stored.size, PART_BYTES):
                    output.write(read_range(stored.url, start, min(start + PART_BYTES, stored.size)))
                    progress()
        size = file.stat().st_size
        if stored.size is not None and size != stored.size:
            raise DamagedTransferError(f"{size:,} of {stored.size:,} bytes of {stored.url} arrived")
        if stored.md5 is not None and not has_digest():
            raise DamagedTransferError(f"the checksum of {stored.url} is wrong")
        if describe_object(stored.url).version != stored.version:
            raise DamagedTransferError(f"{stored.url} has changed while it was read")

    with_retries(download_once, stored.url, is_damaged)


def md5_of(file: Path) -> str:
    """Return the MD5 of a file's content, with which stores describe objects."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def multipart_md5(file: Path) -> str:
    """Return the ETag of S3 for a file that `upload` wrote in parts."""
    digests = []
    with open(file, "rb") as content:
        while part := content.read(PART_BYTES):
            digests.append(hashlib.md5(part, usedforsecurity=False).digest())
    return f"{hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}"


def upload(file: Path, url: str) -> None:
    """Write a local file as an object, which readers find complete or not at all."""
    part_size = {"chunksize": PART_BYTES} if url.startswith("s3://") else {}
    overwrite = {"overwrite": True} if url.startswith("az://") else {}
    with_retries(lambda: file_system(url).put_file(str(file), url, **part_size, **overwrite), url)


def write_object(url: str, content: bytes) -> None:
    """Write a small object."""
    with_retries(lambda: file_system(url).pipe_file(url, content), url)


def check_writable(field: str, folder: str) -> None:
    """Raise UserError if objects cannot be written to a folder, which `field` names."""
    with errors_of_store(field, folder):
        write_object(f"{folder}/write-test", b"phalanx")
        remove_objects([f"{folder}/write-test"])


def remove_objects(urls: Sequence[str]) -> None:
    """Remove objects; missing ones are not an error."""
    for url in urls:

        def remove(url: str = url) -> None:
            try:
                file_system(url).rm_file(url)
            except FileNotFoundError:
                return

        with_retries(remove, url)
