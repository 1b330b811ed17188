"""The last collectives of this rank from PyTorch's flight recorders for gloo and NCCL."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from phalanx.debug.collective_log import is_user_code
from phalanx.runs.hang_dumps import Frame, RecordedCollective

MAX_COLLECTIVES = 300
MAX_COLLECTIVES_PER_GROUP = 4
"""Maximum number of collectives in a dump: the last ones over all groups, and the last ones of each group."""
RECORDERS = {"gloo": "_dump_fr_trace", "nccl": "_dump_nccl_trace"}
"""PyTorch's recorders by backend; that of NCCL exists with CUDA."""


def recorder_fingerprint() -> bytes:
    """Return bytes that change whenever a collective (on NCCL also a message) starts or ends.

    It takes a tenth of a millisecond."""
    return b"".join(dump(False, False, False) for dump in _find_recorders().values())


def recent_collectives(with_lines: bool) -> list[RecordedCollective]:
    """Return the last recorded collectives of this rank, oldest first.

    With their calling lines it takes a second the first time, because PyTorch then reads its own symbols."""
    calls: list[tuple[str, dict[str, Any]]] = []
    for backend, dump in _find_recorders().items():
        # Trusted input: PyTorch has just created these bytes in this process.
        entries = pickle.loads(dump(True, with_lines, False)).get("entries", [])
        calls += [(backend, entry) for entry in entries if not entry["is_p2p"]]
    calls.sort(key=lambda item: item[1]["time_created_ns"])
    return keep_most_recent([_to_record(backend, entry) for backend, entry in calls])


def group_ranks() -> dict[str, list[int]]:
    """Return the ranks of this rank's process groups, by the group names of its collectives."""
    groups = list(dist.distributed_c10d._world.pg_map)
    return {
        _group_label(group.group_name, backend): dist.get_process_group_ranks(group)
        for group in groups
        for backend in _find_recorders()
    }


def keep_most_recent(calls: Sequence[RecordedCollective]) -> list[RecordedCollective]:
    """Return the last calls of all groups together, and the last few of every group."""
    newer_calls: Counter[str] = Counter()
    chosen = []
    for index, call in enumerate(reversed(calls)):
        newer_calls[call["group"]] += 1
        if index < MAX_COLLECTIVES or newer_calls[call["group"]] <= MAX_COLLECTIVES_PER_GROUP:
            chosen.append(call)
    return chosen[::-1]


def _find_recorders() -> dict[str, Callable[[bool, bool, bool], bytes]]:
    """Return the available recorders.

    Their arguments are three switches: with collectives, with stacks, only pending ones."""
    return {backend: getattr(c10d, name) for backend, name in RECORDERS.items() if hasattr(c10d, name)}


def _group_label(group: str, backend: str) -> str:
    """Return the name of a group for one backend, because each backend counts its collectives separately."""
    return f"{group} ({backend})"


def _to_record(backend: str, entry: dict[str, Any]) -> RecordedCollective:
    frames: list[Frame] = [(f["filename"], f["line"], f["name"]) for f in entry.get("frames", ())]
    return {
        "group": _group_label(entry["process_group"][0], backend),
        "number": entry["collective_seq_id"],
        "operation": entry["profiling_name"].partition(":")[2],
        "inputs": entry["input_sizes"],
        "outputs": entry["output_sizes"],
        "dtypes": entry["input_dtypes"],
        # Gloo leaves the state at "scheduled"; NCCL's state contains more than `retired`, which only records a wait.
        "over": bool(entry["retired"]) or entry["state"] == "completed",
        "at": next((frame for frame in frames if is_user_code(frame[0])), None),
    }
