"""Other numbers for the experts of a checkpoint. A mixture is what it was when its experts change places and the router
follows; but which of them are neighbours, and so on one rank, is not."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from phalanx.train.manifest import publish, sha256, sync

BEFORE = ".before"
"""What is put behind the name of the checkpoint that was renumbered; it is kept."""
_OF_EXPERTS = re.compile(r"blocks\.(\d+)\.mlp\.(experts\.\w+|router\.gate\.weight|router\.bias)$")


def renumber(checkpoint: Path, orders: Mapping[int, Sequence[int]]) -> Path:
    """Write a checkpoint anew, in which expert i of a layer is the one that was number `orders[layer][i]`; weights,
    router and optimizer state follow. The one before is kept beside it; returns where.

    It takes as much memory as the checkpoint has bytes.
    """
    tensors = read_tensors(checkpoint)
    for name, tensor in tensors.items():
        found = _OF_EXPERTS.search(name)
        if found and tensor.ndim and int(found[1]) in orders:
            tensors[name] = tensor[torch.tensor(orders[int(found[1])])]
    unfinished, before = checkpoint.with_suffix(".tmp"), checkpoint.with_suffix(BEFORE)
    for leftover in (unfinished, before):
        if leftover.exists():
            shutil.rmtree(leftover)
    unfinished.mkdir()
    save(tensors, storage_writer=HuggingFaceStorageWriter(str(unfinished), save_distributed=True), no_dist=True)
    shutil.copy2(checkpoint / "manifest.json", unfinished)
    for record in checkpoint.glob("rank-*.json"):
        random_state = json.loads(record.read_text())["random"]
        (unfinished / record.name).write_text(json.dumps({"random": random_state}))
    sums = {}
    for file in sorted(unfinished.iterdir()):
        sync(file)
        sums[file.name] = sha256(file)
    checkpoint.rename(before)
    publish(unfinished, sums)
    return before


def read_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """All of a checkpoint, whole, in CPU memory."""
    reader = HuggingFaceStorageReader(str(checkpoint))
    entries = reader.read_metadata().state_dict_metadata.items()
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors
