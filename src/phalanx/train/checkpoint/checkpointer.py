"""Sharded checkpoints by PyTorch's DCP, written in the background as safetensors without pickle.

They can be loaded with any layout and world size.

Why: `docs/design/decisions/checkpoints-dcp.md`."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from phalanx.parallel.comm.objects import broadcast_from_rank0, gather_results, rank_and_world_size
from phalanx.parallel.dtensor_shards import local_tensor
from phalanx.runs.checkpoint_store import drop_shards, is_local, is_stored
from phalanx.runs.checkpoints import (
    ABANDONED_SUFFIX,
    DAMAGED_SUFFIX,
    FORMAT,
    PREVIOUS_SUFFIX,
    checkpoints,
    checkpoints_to_keep,
    find_damaged_files,
    publish,
    quarantine,
    read_checksums,
    recover_interrupted_rewrites,
    sha256,
    step_name,
    step_of,
    sync,
    write_synced,
)
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import format_bytes
from phalanx.spec.run import KeepSpec
from phalanx.train.checkpoint.host_copies import HostCopies
from phalanx.train.checkpoint.state import rng_state
from phalanx.train.checkpoint.uploader import CheckpointUploader

logger = logging.getLogger(__name__)

FILE_BYTES = 32 * 2**20
"""Approximate size of the files of offloaded tensors: DCP builds each file in memory."""


class Checkpointer:
    """Background saver: `save` copies the state and returns; a thread writes, checksums and publishes."""

    def __init__(self, directory: Path, keep: KeepSpec, store: str | None = None) -> None:
        """Save in a directory; `store` is the URL of a folder to which checkpoints are uploaded."""
        self.directory = directory
        self.keep = keep
        self.rank, self.world_size = rank_and_world_size()
        # The thread has its own group, because its collectives must not mix with those of training.
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._uploader = None
        if store is not None:
            self._uploader = CheckpointUploader(directory, store, keep, self._remove_old_checkpoints)
        self._host_copies = HostCopies()
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.save_seconds = 0.0
        """Duration of the last complete save, most of it in the background."""
        if self.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            for leftover in directory.glob("*.tmp"):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    def save(
        self, step: int, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any], on_disk: bool = False
    ) -> None:
        """Start to save, after waiting for the previous save.

        State that is offloaded to disk (`on_disk`) may exceed the memory. It is not copied, but saved before this
        returns."""
        self.wait()
        path = self.directory / f"{step_name(step)}.tmp"
        if self.rank == 0:
            path.mkdir(parents=True)
        self._wait_for_all_ranks()
        full_manifest = {"format": FORMAT, "version": 1, "step": step, "world_size": self.world_size, **manifest}
        if on_disk:
            files = assign_to_files(tensors, FILE_BYTES)
            self._write_checkpoint(path, dict(tensors), rng_state(), full_manifest, files)
            self.wait()
            return
        arguments = path, self._host_copies.copy(tensors), rng_state(), full_manifest, None
        self._thread = threading.Thread(target=self._write_checkpoint, args=arguments, daemon=True)
        self._thread.start()

    def _write_checkpoint(
        self,
        path: Path,
        tensors: dict[str, Tensor],
        random_state: dict[str, str],
        manifest: dict[str, Any],
        files: dict[str, int] | None,
    ) -> None:
        """Write and publish a checkpoint. `files` maps each tensor to the number of its file; None: one file."""
        started_at = time.perf_counter()
        try:
            # The current GPU of a new thread is GPU 0, on which DCP would open a context for every rank.
            if self._gpu is not None:
                torch.cuda.set_device(self._gpu)
            self._host_copies.wait()
            self._make_room(path.with_suffix(""), tensors)
            writer = HuggingFaceStorageWriter(str(path), fqn_to_index_mapping=files, save_distributed=True)
            save(tensors, storage_writer=writer, process_group=self.group, no_dist=self.group is None)
            local_files = sorted(path.glob(f"shard-{self.rank + 1:05d}-*"))
            for file in local_files:
                sync(file)
            size = format_bytes(sum(file.stat().st_size for file in local_files))
            record = {"random": random_state, "sha256": {file.name: sha256(file) for file in local_files}}
            write_synced(path / f"rank-{self.rank:05d}.json", json.dumps(record))
            self._wait_for_all_ranks()
            if self.rank == 0:
                write_synced(path / "manifest.json", json.dumps(manifest, indent=1))
                ranks = sorted(path.glob("rank-*.json"))
                if len(ranks) != self.world_size:
                    raise OSError(f"{self.world_size} ranks wrote their parts, but the number of parts is {len(ranks)}")
                checksums = {file.name: sha256(file) for file in [*ranks, path / "manifest.json"]}
                for file in ranks:
                    checksums |= json.loads(file.read_text())["sha256"]
                publish(path, checksums)
                self._remove_old_checkpoints()
            if self._uploader is not None:
                self._uploader.request()
            self.save_seconds = time.perf_counter() - started_at
            logger.debug("saved %s of %s in %.2f s", size, path.stem, self.save_seconds)
        except BaseException as error:  # DCP's CheckpointException is not an Exception; `wait` raises it
            self._error = error
            # On a full disk, the space of the failed checkpoint is needed to report the failure. A rank removes its own
            # files: other ranks may reach a barrier that it has passed, and rank 0 may have published their files.
            if self.rank == 0:
                shutil.rmtree(path, ignore_errors=True)
            for file in path.glob(f"shard-{self.rank + 1:05d}-*"):
                file.unlink(missing_ok=True)

    def _remove_old_checkpoints(self) -> None:
        """Remove the checkpoints that are not to be kept, and renamed ones older than the last to keep.

        A checkpoint that another process is reading, or that is being uploaded, is left for the next save to remove."""
        saved = checkpoints(self.directory)
        for old in set(saved) - checkpoints_to_keep(saved, self.keep) - {self._uploading}:
            shutil.rmtree(old, ignore_errors=True)
            shutil.rmtree(old.with_suffix(PREVIOUS_SUFFIX), ignore_errors=True)
        for older in saved[1:]:
            drop_shards(older)
        oldest_last = saved[: self.keep.last][-1]
        for aside in self.directory.glob("step-*") if len(saved) >= self.keep.last else ():
            if aside.suffix in (DAMAGED_SUFFIX, ABANDONED_SUFFIX) and aside < oldest_last:
                shutil.rmtree(aside, ignore_errors=True)

    def _make_room(self, new: Path, tensors: Mapping[str, Tensor]) -> None:
        """Remove older checkpoints if the disk is too full for a new one."""
        size = torch.tensor([sum(local_tensor(tensor).nbytes for tensor in tensors.values())])
        if self.group is not None:
            dist.all_reduce(size, group=self.group)
        if self.rank == 0:
            free_disk(new, int(size), self.keep, self._uploading)
        self._wait_for_all_ranks()

    @property
    def _uploading(self) -> Path | None:
        """On rank 0, the checkpoint that is being uploaded, if there is one."""
        return self._uploader.current if self._uploader is not None else None

    def finish_uploads(self, timeout_seconds: float, should_end: Callable[[], bool] = lambda: False) -> list[str]:
        """Wait for uploads to the object store, if there is one; return the checkpoints that it lacks at the end."""
        return self._uploader.finish(timeout_seconds, should_end) if self._uploader is not None else []

    @property
    def num_upload_polls(self) -> int:
        """A number that increases while this rank waits for uploads."""
        return self._uploader.num_polls if self._uploader is not None else 0

    def wait(self) -> None:
        """Wait until the current save, if any, is complete; raises UserError if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            # A CheckpointException contains the failure of each rank.
            failures = getattr(error, "failures", None)
            cause = str(next(iter(failures.values()))[0] if failures else error) or type(error).__name__
            fix = "free space or check the directory; the earlier checkpoints are intact"
            raise UserError("checkpoint", str(self.directory), f"could not be written: {cause}", fix) from error

    def wait_for_all_ranks(self) -> None:
        """Wait until the current save, if any, is published by rank 0; raises UserError if it failed on this rank."""
        self.wait()
        self._wait_for_all_ranks()

    @property
    def is_saving(self) -> bool:
        """True while a save runs in the background."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_complete(self) -> bool:
        """True if no save runs, and the last one did not fail."""
        return not self.is_saving and self._error is None

    def _wait_for_all_ranks(self) -> None:
        if self.group is not None:
            dist.barrier(group=self.group)


def free_disk(new: Path, needed_bytes: int, keep: KeepSpec, uploading: Path | None = None) -> None:
    """Remove checkpoints from a full disk, oldest first, until there is room for a `new` one.

    First the local copies of shards in an object store are removed, then checkpoints that the new one replaces. The
    newest remains until the new one is complete, and that which is `uploading` until the next save."""
    saved = checkpoints(new.parent)
    kept = {*saved[:1], *checkpoints_to_keep([new, *saved], keep), uploading}
    steps: list[tuple[Callable[[Path], object], Path]] = []
    steps += [(drop_shards, path) for path in reversed(saved) if is_stored(path) and is_local(path)]
    steps += [(shutil.rmtree, path) for path in reversed(saved) if path not in kept]
    for remove, path in steps:
        free_bytes = shutil.disk_usage(new.parent).free
        if free_bytes >= needed_bytes:
            return
        text = "the disk has %s free, and a checkpoint needs %s: %s is removed from it before the new one is written"
        logger.warning(text, format_bytes(free_bytes), format_bytes(needed_bytes), path.name)
        remove(path)


def assign_to_files(tensors: Mapping[str, Tensor], limit: int) -> dict[str, int]:
    """Return the file number, from 1, of each tensor, with about `limit` bytes per file of a rank.

    All ranks use the numbers of rank 0, which owns at least as much as any other rank."""
    index = 1
    size = 0
    files = {}
    for name, tensor in tensors.items():
        local_bytes = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
        if size and size + local_bytes > limit:
            index, size = index + 1, 0
        files[name] = index
        size += local_bytes
    return files


def latest_step(directory: Path) -> int:
    """Return the step of the newest checkpoint, valid or not; -1 if none exists (a collective)."""
    return broadcast_from_rank0(lambda: max(map(step_of, checkpoints(directory)), default=-1))


def latest_valid_checkpoint(directory: Path, before_step: int | None = None) -> tuple[Path | None, dict[str, str]]:
    """Return the newest undamaged checkpoint, and the problems of newer ones, which are quarantined.

    This is a collective. Each rank checks its share of the files, so that no rank waits long for another. Checkpoints
    from `before_step` on are ignored, if given."""

    def candidates() -> list[str]:
        recover_interrupted_rewrites(directory)
        return [path.name for path in checkpoints(directory) if before_step is None or step_of(path) < before_step]

    checkpoint = None
    damaged = {}
    for name in broadcast_from_rank0(candidates):
        problem = _find_damage_collectively(directory / name)
        if problem is None:
            checkpoint = directory / name
            break
        damaged[name] = problem
    broadcast_from_rank0(lambda: quarantine(directory, damaged, checkpoint))
    return checkpoint, damaged


def _find_damage_collectively(checkpoint: Path) -> str | None:
    """Return the problem of a checkpoint, if any, with the files distributed over all ranks."""

    def load_checksums() -> tuple[dict[str, str], str | None]:
        try:
            return read_checksums(checkpoint), None
        except ValueError as problem:
            return {}, str(problem)

    checksums, problem = broadcast_from_rank0(load_checksums)
    if problem is not None or not dist.is_initialized():
        return problem or find_damaged_files(checkpoint, checksums)
    rank, ranks = rank_and_world_size()
    share = dict(sorted(checksums.items())[rank::ranks])
    problems = gather_results(lambda: find_damaged_files(checkpoint, share))
    return next((rank_problem for rank_problem in problems if rank_problem is not None), None)
