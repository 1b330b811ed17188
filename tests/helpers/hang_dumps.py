"""Hang dumps of ranks: hand-written, or from simulated programs of collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.runs.hang_dumps import (
    FORMAT,
    STALLED,
    HangDump,
)
from phalanx.spec.parallel_dims import ParallelDims, process_groups

WAITING = ("/x/torch/distributed/distributed_c10d.py", 3245, "all_reduce")
BUSY = ("/x/mine/model.py", 7, "forward")


@dataclass(frozen=True)
class Op:
    """Line of a program: a collective of a group."""

    group: str
    operation: str
    size: int
    line: int


Program = list[Op]


def program_groups(sizes: ParallelDims) -> dict[str, list[tuple[int, ...]]]:
    """Return the ranks of each group that a program names; each name stands for several groups."""
    all_ranks = tuple(range(sizes.world_size))
    return {
        "all": [all_ranks],
        "tp": process_groups(sizes, "tp"),
        "dp": process_groups(sizes, "dp_replicate", "dp_shard"),
    }


def group_of_rank(sizes: ParallelDims, name: str, rank: int) -> tuple[int, ...]:
    return next(group for group in program_groups(sizes)[name] if rank in group)


def simulate_hang(programs: list[Program], sizes: ParallelDims) -> dict[int, HangDump] | None:
    """Return the hang dumps of ranks that block in every collective
    when none can continue; None if all ranks finish."""
    done = [0] * len(programs)
    count: list[dict[str, int]] = [{} for _ in programs]
    calls: list[list[dict[str, Any]]] = [[] for _ in programs]
    current: list[Op | None] = [None] * len(programs)
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            if current[rank] is None and done[rank] < len(program):
                op = program[done[rank]]
                current[rank], moved = op, True
                count[rank][op.group] = count[rank].get(op.group, 0) + 1
                call = {
                    "group": f"{op.group}{group_of_rank(sizes, op.group, rank)[0]}",
                    "number": count[rank][op.group],
                }
                call |= {"operation": op.operation, "inputs": [[op.size]], "outputs": [], "dtypes": ["Float"]}
                calls[rank].append(call | {"over": False, "at": ("mine/model.py", op.line, "step")})
        for rank, op in enumerate(current):
            if op is None:
                continue
            group = group_of_rank(sizes, op.group, rank)
            group_ops = [current[other] for other in group]
            same = {(o.group, o.operation, o.size) if o else None for o in group_ops}
            if len(same) == 1 and len({count[other][op.group] for other in group}) == 1:
                for other in group:
                    current[other], moved = None, True
                    calls[other][-1]["over"] = True
                    done[other] += 1
    if all(op is None for op in current):
        return None
    return {
        rank: make_dump(rank, sizes, calls[rank], WAITING if current[rank] else BUSY) for rank in range(len(programs))
    }


def make_dump(rank: int, sizes: ParallelDims, calls: Any, frame: Any, **changes: Any) -> HangDump:
    groups = {
        f"{name}{group_of_rank(sizes, name, rank)[0]}": list(group_of_rank(sizes, name, rank))
        for name in program_groups(sizes)
    }
    dump = {"format": FORMAT, "rank": rank, "ranks": sizes.world_size, "host": "here", "pid": rank, "time": 1.0}
    dump |= {
        "step": 3,
        "why": STALLED,
        "stalled_seconds": 1.0,
        "stack": [frame],
        "waiting": frame is WAITING,
        "groups": groups,
    }
    return {**dump, "calls": calls, "sibling_states": {}, "oom_kills": 0, **changes}  # type: ignore[return-value, typeddict-item]
