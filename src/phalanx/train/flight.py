"""The collectives that this rank called, as PyTorch's flight recorder remembers them: gloo's, and NCCL's."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from phalanx.measure.calls import is_own
from phalanx.measure.incident import Call, Place

BUFFER, REMEMBERED = "TORCH_FR_BUFFER_SIZE", 2000
"""Collectives that a rank remembers."""
KEPT, KEPT_OF_GROUP = 300, 4
"""Of these, so many are written down: the last ones of all, and of every group."""
RECORDERS = ("_dump_fr_trace", "_dump_nccl_trace")
"""PyTorch's: of gloo, and where it has CUDA of NCCL."""


def record_collectives() -> None:
    """Have them remembered: before there is a process group. What the user has set stays."""
    os.environ.setdefault(BUFFER, str(REMEMBERED))


def moved() -> bytes:
    """Something that changes whenever a collective or a message is begun or has ended: a tenth of a millisecond."""
    return b"".join(_recorder(name, False, False) for name in RECORDERS)


def calls(with_lines: bool) -> list[Call]:
    """The last ones that this rank remembers, oldest first. With the lines that they were called from it takes a second
    the first time: PyTorch then reads its own symbols."""
    found: list[dict[str, Any]] = []
    for name in RECORDERS:
        dumped = _recorder(name, True, with_lines)
        if dumped:
            # Not from outside: PyTorch made these bytes in this process, a moment ago.
            found += pickle.loads(dumped).get("entries", [])
    found.sort(key=lambda entry: entry["time_created_ns"])
    return kept([_call(entry) for entry in found if not entry["is_p2p"]])


def group_ranks() -> dict[str, list[int]]:
    """The ranks of this rank's process groups, by the names that its collectives have."""
    known = list(dist.distributed_c10d._world.pg_map)
    return {group.group_name: dist.get_process_group_ranks(group) for group in known}


def kept(found: Sequence[Call]) -> list[Call]:
    """The last of all, and the last few of every group."""
    later: Counter[str] = Counter()
    chosen = []
    for place, call in enumerate(reversed(found)):
        later[call["group"]] += 1
        if place < KEPT or later[call["group"]] <= KEPT_OF_GROUP:
            chosen.append(call)
    return chosen[::-1]


def _recorder(name: str, collectives: bool, stacks: bool) -> bytes:
    dump = getattr(c10d, name, None)
    return b"" if dump is None else dump(collectives, stacks, False)


def _call(entry: dict[str, Any]) -> Call:
    places: list[Place] = [(f["filename"], f["line"], f["name"]) for f in entry.get("frames", ())]
    return {
        "group": entry["process_group"][0],
        "number": entry["collective_seq_id"],
        "operation": entry["profiling_name"].partition(":")[2],
        "inputs": entry["input_sizes"],
        "outputs": entry["output_sizes"],
        "dtypes": entry["input_dtypes"],
        # Gloo leaves the state at "scheduled", and NCCL's says more than whether somebody waited.
        "over": bool(entry["retired"]) or entry["state"] == "completed",
        "at": next((place for place in places if is_own(place[0])), None),
    }
