"""Reader of checkpoints whose shards are in an object store: a rank reads the headers, and the slices that it needs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.distributed.checkpoint._hf_utils import _get_dtype
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from phalanx.data.places import errors_of_store
from phalanx.runs.checkpoint_store import is_local
from phalanx.runs.stored_shards import FIELD, StoredShard, read_shards

LENGTH_BYTES = 8
"""Bytes of the length of a header, at the beginning of a safetensors file."""


def open_checkpoint(checkpoint: Path) -> HuggingFaceStorageReader:
    """Return the reader of a checkpoint, which may be in an object store."""
    return HuggingFaceStorageReader(str(checkpoint)) if is_local(checkpoint) else StoredCheckpointReader(checkpoint)


class StoredCheckpointReader(HuggingFaceStorageReader):
    """DCP's reader of safetensors files, with ranged reads of an object store.

    DCP reads the metadata from a temporary directory with the header of each shard, in a sparse file of its size."""

    def __init__(self, checkpoint: Path) -> None:
        self._headers = TemporaryDirectory(prefix="phalanx-headers-")
        super().__init__(self._headers.name)
        records = read_shards(checkpoint) or {"url": "", "shards": {}}
        self._shards: dict[str, StoredShard] = {}
        self._entries: dict[str, dict[str, Any]] = {}
        """Tensors of each file, as in its header."""
        self._data_starts: dict[str, int] = {}
        for name, record in records["shards"].items():
            shard = StoredShard(f"{records['url']}/{name}", record)
            with errors_of_store(FIELD, shard.url):
                length = int.from_bytes(shard.read(0, LENGTH_BYTES), "little")
                header = shard.read(0, LENGTH_BYTES + length)
            file = Path(self._headers.name) / name
            with open(file, "wb") as sparse_file:
                sparse_file.write(header)
                sparse_file.truncate(record["bytes"])
            self._shards[str(file)] = shard
            self._entries[str(file)] = json.loads(header[LENGTH_BYTES:])
            self._data_starts[str(file)] = len(header)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the slices of a plan from the store to its tensors, in the order of the files."""
        for file in self._shards:
            items = [item for item in plan.items if self.storage_data[item.storage_index].relative_path == file]
            slices = {item: self.stored_slice(file, item.storage_index.fqn) for item in items}
            for item in sorted(items, key=lambda item: slices[item].start):
                target = planner.resolve_tensor(item).detach()
                offsets = zip(item.storage_offsets, item.lengths, strict=True)
                target.copy_(slices[item][tuple(slice(offset, offset + length) for offset, length in offsets)])
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def stored_slice(self, file: str, name: str) -> StoredSlice:
        """Return a tensor in a file, of which parts are read; `file` is the path of its header here."""
        entry = self._entries[file][name]
        start = self._data_starts[file] + entry["data_offsets"][0]
        return StoredSlice(self._shards[file], start, tuple(entry["shape"]), _get_dtype(entry["dtype"]))


@dataclass(frozen=True)
class StoredSlice:
    """A tensor in a file of an object store, indexed like a slice of safetensors."""

    shard: StoredShard
    start: int
    """Position of its data in the file."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        """Read a part. Its rows are read completely, because they are contiguous."""
        rows = range(*index[0].indices(self.shape[0])) if self.shape else range(1)
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        begin = self.start + rows.start * row_bytes
        with errors_of_store(FIELD, self.shard.url):
            content = self.shard.read(begin, begin + len(rows) * row_bytes)
        values = torch.frombuffer(bytearray(content), dtype=self.dtype) if content else torch.empty(0, dtype=self.dtype)
        return values.view(len(rows), *self.shape[1:])[(slice(None), *index[1:])] if self.shape else values.view(())
