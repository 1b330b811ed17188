"""History of allocations on a GPU, and its snapshot after an out-of-memory error (`metrics.allocation_history`)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from phalanx.runs.hang_dumps import memory_snapshot_file

logger = logging.getLogger(__name__)

MAX_EVENTS = 100_000
"""Maximum number of allocations and frees in the history: some steps of a model of a few dozen blocks."""


def record_allocations() -> None:
    """Record allocations and frees from now on, in a ring buffer, with the Python stack of each allocation.

    C++ stacks would make the snapshot a hundred times slower (pytorch/torchtitan, pull request 3628)."""
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=MAX_EVENTS)


def snapshot_entry(directory: Path, rank: int, is_recorded: bool) -> dict[str, Any]:
    """Write a snapshot after an out-of-memory error of a GPU, and return its entry in the failure record.

    The entry is {} if the file cannot be written, and has None if nothing was recorded."""
    if not is_recorded:
        return {"snapshot": None}
    file = memory_snapshot_file(directory, rank)
    try:
        file.parent.mkdir(exist_ok=True)
        partial_file = file.with_suffix(".partial-snapshot")
        torch.cuda.memory._dump_snapshot(str(partial_file))
        partial_file.replace(file)
    except (OSError, MemoryError, RuntimeError) as second:
        logger.warning("%s could not be written: %s", file, second)
        return {}
    return {"snapshot": str(file)}
