"""Sharded checkpoints by PyTorch's DCP, written beside the training, in safetensors (nothing is pickled), and their
return into any layout and world size."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from phalanx.parallel.comm.objects import all_gather_objects, broadcast_from_rank0
from phalanx.runs.checkpoints import (
    DAMAGED_SUFFIX,
    FORMAT,
    PREVIOUS_SUFFIX,
    checkpoints,
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
from phalanx.train.checkpoint.host_copies import HostCopies
from phalanx.train.checkpoint.state import rng_state

FILE_BYTES = 32 * 2**20
"""Tensors that rest on disk are saved in files of about so much: DCP makes each whole in memory."""


class Checkpointer:
    """Saves beside the training: `save` copies the state and returns; a thread writes, checksums and publishes."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory
        self.keep = keep
        distributed = dist.is_initialized()
        self.rank = dist.get_rank() if distributed else 0
        self.world_size = dist.get_world_size() if distributed else 1
        # Its own group: the thread's collectives must not mix with the training's.
        self.group = dist.new_group(backend="gloo") if distributed else None
        self._host_copies = HostCopies()
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.save_seconds = 0.0
        """What the last complete save took, most of it behind the training."""
        if self.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            for leftover in directory.glob("*.tmp"):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    def save(
        self, step: int, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any], on_disk: bool = False
    ) -> None:
        """Begin to save; waits for the save before it. What rests `on_disk` may be more than memory holds: it is not
        copied, but saved before this returns."""
        self.wait()
        path = self.directory / f"{step_name(step)}.tmp"
        if self.rank == 0:
            path.mkdir(parents=True)
        self._barrier()
        full_manifest = {"format": FORMAT, "version": 1, "step": step, "world_size": self.world_size, **manifest}
        if on_disk:
            files = assign_to_files(tensors, FILE_BYTES)
            self._write(path, dict(tensors), rng_state(), manifest=full_manifest, files=files)
            self.wait()
            return
        arguments = path, self._host_copies.copy(tensors), rng_state(), full_manifest, None
        self._thread = threading.Thread(target=self._write, args=arguments, daemon=True)
        self._thread.start()

    def _write(
        self,
        path: Path,
        tensors: dict[str, Tensor],
        random_state: dict[str, str],
        manifest: dict[str, Any],
        files: dict[str, int] | None,
    ) -> None:
        """`files` gives the number of the file that each tensor is written to; all to one if None."""
        started_at = time.perf_counter()
        try:
            if self._gpu is not None:  # a new thread's is 0, where DCP would open a context of every rank
                torch.cuda.set_device(self._gpu)
            self._host_copies.wait()
            writer = HuggingFaceStorageWriter(str(path), fqn_to_index_mapping=files, save_distributed=True)
            save(tensors, storage_writer=writer, process_group=self.group, no_dist=self.group is None)
            local_files = sorted(path.glob(f"shard-{self.rank + 1:05d}-*"))
            for file in local_files:
                sync(file)
            record = {"random": random_state, "sha256": {file.name: sha256(file) for file in local_files}}
            write_synced(path / f"rank-{self.rank:05d}.json", json.dumps(record))
            self._barrier()
            if self.rank == 0:
                write_synced(path / "manifest.json", json.dumps(manifest, indent=1))
                ranks = sorted(path.glob("rank-*.json"))
                if len(ranks) != self.world_size:
                    raise OSError(f"{self.world_size} ranks wrote their parts, and those of {len(ranks)} are there")
                checksums = {file.name: sha256(file) for file in [*ranks, path / "manifest.json"]}
                for file in ranks:
                    checksums |= json.loads(file.read_text())["sha256"]
                publish(path, checksums)
                self._remove_old()
            self.save_seconds = time.perf_counter() - started_at
        except BaseException as error:  # DCP's CheckpointException is no Exception; `wait` raises it in the main thread
            self._error = error
            self._discard(path)  # what it takes of a full disk is needed to say so

    def _remove_old(self) -> None:
        """Remove what is older than the checkpoints to keep, set aside or not; what somebody reads is left to the next
        save."""
        saved = checkpoints(self.directory)
        for old in saved[self.keep :]:
            shutil.rmtree(old, ignore_errors=True)
            shutil.rmtree(old.with_suffix(PREVIOUS_SUFFIX), ignore_errors=True)
        for damaged in self.directory.glob(f"*{DAMAGED_SUFFIX}"):
            if len(saved) >= self.keep and damaged < saved[self.keep - 1]:
                shutil.rmtree(damaged, ignore_errors=True)

    def _discard(self, path: Path) -> None:
        """Remove what this rank wrote of a checkpoint, rank 0 all of it: others may come to a barrier that it passed,
        and it may have published what they wrote."""
        if self.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        for file in path.glob(f"shard-{self.rank + 1:05d}-*"):
            file.unlink(missing_ok=True)

    def wait(self) -> None:
        """Wait until the save under way, if any, is complete. Raises UserError if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise UserError(
                "checkpoint",
                str(self.directory),
                f"could not be written: {_format_error(error)}",
                fix="free space or check the directory; the checkpoints before it are intact",
            ) from error

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way, behind the training."""
        return self._thread is not None and self._thread.is_alive()

    def _barrier(self) -> None:
        if self.group is not None:
            dist.barrier(group=self.group)


def assign_to_files(tensors: Mapping[str, Tensor], limit: int) -> dict[str, int]:
    """Which file, from 1, each tensor goes to, so that a rank's files have about `limit` bytes. All ranks go by what
    rank 0 finds, which owns no less than any other."""
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


def _format_error(error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # of a CheckpointException: what each rank met
    return str(next(iter(failures.values()))[0] if failures else error) or type(error).__name__


def latest_step(directory: Path) -> int:
    """The step of the newest checkpoint in a directory, whole or not; -1 where there is none. A collective."""
    return broadcast_from_rank0(lambda: max(map(step_of, checkpoints(directory)), default=-1))


def latest_valid_checkpoint(directory: Path, before_step: int | None = None) -> tuple[Path | None, dict[str, str]]:
    """The newest undamaged checkpoint in a directory, of a step before `before_step` if it is given, and what is
    wrong with those that are newer, which are set aside. A collective: each rank looks at its share of the files, so
    that nobody waits for long for another, however much there is."""

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
    if not dist.is_initialized() or dist.get_rank() == 0:
        quarantine(directory, damaged, checkpoint)
    return checkpoint, damaged


def _find_damage_collectively(checkpoint: Path) -> str | None:
    """`manifest.find_damage`, found by all ranks together."""

    def load_checksums() -> tuple[dict[str, str], str | None]:
        try:
            return read_checksums(checkpoint), None
        except ValueError as problem:
            return {}, str(problem)

    checksums, problem = broadcast_from_rank0(load_checksums)
    if problem is not None or not dist.is_initialized():
        return problem or find_damaged_files(checkpoint, checksums)
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    problems = all_gather_objects(find_damaged_files(checkpoint, dict(sorted(checksums.items())[rank::ranks])))
    return next((rank_problem for rank_problem in problems if rank_problem is not None), None)
