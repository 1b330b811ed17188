"""Upload of checkpoints to an object store, by all ranks in the background.

A failure never stops training: the checkpoint remains in the run directory, and is uploaded with a later one."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from phalanx.data.places import describe_error
from phalanx.parallel.comm.objects import all_gather_objects, broadcast_from_rank0, rank_and_world_size
from phalanx.runs.checkpoint_store import complete_upload, not_stored, remove_stored, remove_stored_step
from phalanx.runs.checkpoints import checkpoints, checkpoints_to_keep, step_of
from phalanx.runs.events import UPLOAD_FAILED, append_event
from phalanx.runs.stored_shards import ShardRecord, upload_verified
from phalanx.spec.run import KeepSpec

logger = logging.getLogger(__name__)


POLL_SECONDS = 0.25
"""Seconds between two looks at the end of uploads and of the wait for them."""


class CheckpointUploader:
    """A thread per rank, which uploads this rank's share of each checkpoint after it is published.

    Ranks agree on the checkpoint to upload. Its shards are uploaded in parallel; rank 0 then completes it, and removes
    older ones that are not to be kept."""

    def __init__(self, directory: Path, folder: str, keep: KeepSpec, remove_old_copies: Callable[[], None]) -> None:
        """Upload from a directory to a folder of the store, then `remove_old_copies` from the directory."""
        self.directory = directory
        self.folder = folder
        self.keep = keep
        self._remove_old_copies = remove_old_copies
        self.rank, self.world_size = rank_and_world_size()
        # An upload may take longer than any collective of training.
        timeout = timedelta(days=1)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None
        self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.current: Path | None = None
        """On rank 0, the checkpoint that is being uploaded, which must not be removed."""
        self.num_polls = 0
        """Counts while `finish` waits. The watchdog takes this for progress, because the wait has an end."""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def request(self) -> None:
        """Upload all checkpoints that the store lacks, after those that are being uploaded; all ranks call this."""
        self._requests.put(True)

    def finish(self, timeout_seconds: float, should_end: Callable[[], bool] = lambda: False) -> list[str]:
        """Wait until all uploads have ended, and return the names of checkpoints that the store lacks.

        After the timeout, or when the wait `should_end`, the uploads are abandoned. All ranks call this."""
        self._requests.put(True)
        self._requests.put(False)
        deadline = time.monotonic() + timeout_seconds
        while self._thread.is_alive() and time.monotonic() < deadline and not should_end():
            self._thread.join(min(POLL_SECONDS, timeout_seconds))
            self.num_polls += 1
        return [checkpoint.name for checkpoint in not_stored(self.directory)]

    def _serve(self) -> None:
        while self._requests.get():
            try:
                self._upload_missing()
            except Exception as error:  # a lost rank, or a disk that cannot be read
                self._report_end(describe_error(error))
                return
            finally:
                self.current = None

    def _upload_missing(self) -> None:
        failed: set[Path] = set()
        while (name := broadcast_from_rank0(lambda: self._choose_next(failed), self._group)) is not None:
            started_at = time.perf_counter()
            records, problem = self._upload_shards(self.directory / name)
            problem = problem or broadcast_from_rank0(partial(self._complete, name, records), self._group)
            if problem is None:
                logger.debug("uploaded %s in %.2f s", name, time.perf_counter() - started_at)
            elif self.rank == 0:
                self._report_failure(name, problem)
                failed.add(self.directory / name)

    def _choose_next(self, failed: set[Path]) -> str | None:
        """Return the name of the newest checkpoint to upload: one that is kept, and that has not failed just now."""
        for checkpoint in not_stored(self.directory):
            if checkpoint in failed:
                continue
            try:
                if checkpoint in checkpoints_to_keep(checkpoints(self.directory), self.keep):
                    self.current = checkpoint
                    # An earlier checkpoint of this step must not be read while it is overwritten.
                    remove_stored_step(self.folder, step_of(checkpoint))
                    return checkpoint.name
            except Exception as error:  # each package has its own errors
                self._report_failure(checkpoint.name, describe_error(error))
                failed.add(checkpoint)
        return None

    def _upload_shards(self, checkpoint: Path) -> tuple[dict[str, ShardRecord], str | None]:
        """Upload a share of the shards; return the records of all ranks' shards, and the first problem of a rank."""
        problem = None
        records: dict[str, ShardRecord] = {}
        try:
            for file in sorted(checkpoint.glob("*.safetensors"))[self.rank :: self.world_size]:
                records[file.name] = upload_verified(file, f"{self.folder}/{checkpoint.name}/{file.name}")
        except Exception as error:  # each package has its own errors
            problem = describe_error(error)
        results = all_gather_objects((records, problem), self._group)
        problems = [rank_problem for _, rank_problem in results if rank_problem is not None]
        all_records = {name: record for rank_records, _ in results for name, record in rank_records.items()}
        return all_records, next(iter(problems), None)

    def _complete(self, name: str, records: Mapping[str, ShardRecord]) -> str | None:
        """Complete a checkpoint whose shards are uploaded, and remove older ones; return the problem if that failed."""
        checkpoint = self.directory / name
        try:
            complete_upload(checkpoint, f"{self.folder}/{name}", records)
        except Exception as error:  # each package has its own errors
            return describe_error(error)
        self.current = None
        for remove in (partial(self._remove_from_store, checkpoint), self._remove_old_copies):
            try:
                remove()
            except Exception as error:  # each package has its own errors
                logger.warning("older checkpoints were not removed: %s", describe_error(error))
        return None

    def _remove_from_store(self, newest: Path) -> None:
        """Remove checkpoints from the store that are not to be kept there, all of them older than the newest."""
        kept = {step_of(path) for path in checkpoints_to_keep(checkpoints(self.directory), self.keep)}
        remove_stored(self.folder, kept, newest=step_of(newest))

    def _report_end(self, problem: str) -> None:
        """Report an error after which no checkpoint is uploaded until the run starts again."""
        logger.warning("checkpoints are no longer uploaded: %s", problem)
        if self.rank == 0:
            name = self.current.name if self.current is not None else "each further checkpoint"
            append_event(self.directory.parent, UPLOAD_FAILED, checkpoint=name, problem=problem)

    def _report_failure(self, name: str, problem: str) -> None:
        text = "%s was not uploaded to %s and remains in %s, until the next save uploads it: %s"
        logger.warning(text, name, self.folder, self.directory, problem)
        append_event(self.directory.parent, UPLOAD_FAILED, checkpoint=name, problem=problem)
