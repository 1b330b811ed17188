"""Checkpoints of a run in an object store (checkpoint.directory).

    s3://BUCKET/FOLDER/RUN/step-00000100/
        shard-*.safetensors, rank-*.json, manifest.json    as in the run directory
        objects.json                                       sizes and checksums of blocks of the shards
        SHA256SUMS                                         written last: without it, there is no checkpoint

In the run directory, a checkpoint of the store has all of its files but the shards. Code that lists checkpoints or
reads manifests need not know where the shards are.

Why: `docs/design/decisions/checkpoint-entries.md`.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from phalanx.data.places import (
    DamagedTransferError,
    StoredObject,
    check_writable,
    errors_of_store,
    is_damaged,
    list_below,
    read_object,
    remove_objects,
    with_retries,
    write_object,
)
from phalanx.runs.checkpoints import CHECKPOINTS_DIR, checkpoints, step_name
from phalanx.runs.create import claim_run_directory
from phalanx.runs.stored_shards import (
    CHECKSUMS_FILE,
    FIELD,
    OBJECTS_FILE,
    ShardRecord,
    ShardRecords,
    decode_shards,
    read_shards,
    write_shards,
)
from phalanx.spec.errors import UserError
from phalanx.spec.run import RunSpec

logger = logging.getLogger(__name__)

_STORED_STEP = re.compile(r"step-(\d{8,})")


def store_folder(run: RunSpec) -> str | None:
    """Return the URL of the folder with the checkpoints of a run; None if they are in the run directory."""
    return f"{run.checkpoint.directory}/{run.name}" if run.checkpoint.directory else None


def stored_checkpoints(folder: str) -> dict[int, list[StoredObject]]:
    """Return the objects of each step in a folder of the store, of incomplete checkpoints as well.

    Raises UserError if the store cannot be reached."""
    steps: dict[int, list[StoredObject]] = {}
    with errors_of_store(FIELD, folder):
        for stored in list_below(folder):
            name, _, file = stored.name.partition("/")
            if (match := _STORED_STEP.fullmatch(name)) and file:
                steps.setdefault(int(match[1]), []).append(stored)
    return steps


def is_complete(objects: list[StoredObject]) -> bool:
    """Return whether the objects of a step are a complete checkpoint."""
    return any(stored.url.endswith(f"/{CHECKSUMS_FILE}") for stored in objects)


def list_in_run_directory(run: RunSpec, directory: Path) -> None:
    """Add the checkpoints of the store that a run directory lacks, all of their files but the shards.

    Raises UserError if the store cannot be reached."""
    folder = store_folder(run)
    if folder is None:
        return
    local = directory / CHECKPOINTS_DIR
    for step, objects in stored_checkpoints(folder).items():
        target = local / step_name(step)
        if is_complete(objects) and not target.exists():
            claim_run_directory(directory)
            with errors_of_store(FIELD, folder):
                _download_entry(f"{folder}/{step_name(step)}", objects, target)


def _download_entry(url: str, objects: list[StoredObject], target: Path) -> None:
    """Write the files of a checkpoint but the shards to the run directory."""
    partial = target.with_name(f"{target.name}.entry.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    checksums = read_object(f"{url}/{CHECKSUMS_FILE}")
    (partial / CHECKSUMS_FILE).write_bytes(checksums)
    # An earlier checkpoint of this step, of more ranks, may have left other files.
    listed = {OBJECTS_FILE, *checksums.decode(errors="replace").split()}
    for name in sorted(listed & {stored.url.rpartition("/")[2] for stored in objects}):
        if not name.endswith(".safetensors"):
            (partial / name).write_bytes(read_object(f"{url}/{name}"))
    # The folder may have been copied to another bucket.
    with suppress(OSError, ValueError):
        records = decode_shards((partial / OBJECTS_FILE).read_bytes())
        write_shards(partial, {**records, "url": url})
    try:
        partial.rename(target)
    except OSError:  # another process was faster
        shutil.rmtree(partial)


def check_store_access(run: RunSpec, resume: bool) -> None:
    """Raise UserError if the checkpoints of a run cannot be written to its store, or another run's are there."""
    folder = store_folder(run)
    if folder is None:
        return
    saved = [step for step, objects in stored_checkpoints(folder).items() if is_complete(objects)]
    if saved and not resume:
        fix = "add --resume to continue this run, or choose another name with --set name=..."
        raise UserError("name", run.name, f"belongs to a run, whose checkpoints are in {folder}", fix)
    check_writable(FIELD, folder)


def complete_upload(checkpoint: Path, url: str, shards: Mapping[str, ShardRecord]) -> None:
    """Upload the small files of a checkpoint whose shards are in the store, the checksums last."""
    records: ShardRecords = {"url": url, "shards": dict(shards)}
    contents = {
        file.name: file.read_bytes()
        for file in checkpoint.iterdir()
        if file.name not in (*shards, OBJECTS_FILE, CHECKSUMS_FILE)
    }
    contents[OBJECTS_FILE] = json.dumps(records).encode()
    contents[CHECKSUMS_FILE] = (checkpoint / CHECKSUMS_FILE).read_bytes()
    for name, content in contents.items():
        write_verified(f"{url}/{name}", content)
    write_shards(checkpoint, records)


def write_verified(url: str, content: bytes) -> None:
    """Write a small object, and read it back. Raises DamagedTransferError if it still differs after several writes."""

    def write() -> None:
        write_object(url, content)
        if read_object(url) != content:
            raise DamagedTransferError(f"{url} differs after it was written")

    with_retries(write, url, is_damaged)


def remove_stored(folder: str, kept: set[int], newest: int) -> None:
    """Remove the checkpoints before the `newest` from a folder of the store, complete or not, unless they are kept."""
    for step, objects in stored_checkpoints(folder).items():
        if step < newest and step not in kept:
            _remove_step(objects)


def remove_stored_step(folder: str, step: int) -> None:
    """Remove the checkpoint of a step from a folder of the store, complete or not, if there is one."""
    _remove_step(stored_checkpoints(folder).get(step, []))


def _remove_step(objects: list[StoredObject]) -> None:
    # The checksums first, so that no reader sees a part of a checkpoint.
    objects.sort(key=lambda stored: not stored.url.endswith(f"/{CHECKSUMS_FILE}"))
    remove_objects([stored.url for stored in objects])


def is_stored(checkpoint: Path) -> bool:
    """Return whether a checkpoint is in the store, completely and verified."""
    return (checkpoint / OBJECTS_FILE).exists()


def is_local(checkpoint: Path) -> bool:
    """Return whether the shards of a checkpoint are on this machine."""
    try:
        records = read_shards(checkpoint)
    except ValueError:
        return True
    return records is None or all((checkpoint / name).exists() for name in records["shards"])


def drop_shards(checkpoint: Path) -> None:
    """Remove the local copies of shards that are in the store."""
    with suppress(ValueError):
        records = read_shards(checkpoint)
        for name in records["shards"] if records else ():
            (checkpoint / name).unlink(missing_ok=True)


def not_stored(directory: Path) -> list[Path]:
    """Return the checkpoints in a directory that are on this machine only, newest first."""
    return [checkpoint for checkpoint in checkpoints(directory) if not is_stored(checkpoint)]
