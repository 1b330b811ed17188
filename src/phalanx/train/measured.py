"""One step of a run measured from inside: what each rank held by part, and every collective; beside what was predicted.

RUN_DIR/measured/rank-00000.json      of each rank
RUN_DIR/measured/beside.json          predicted beside measured"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from phalanx.cost.memory import rank_memory
from phalanx.cost.network import Traffic
from phalanx.cost.traffic import run_traffic
from phalanx.spec.layout import Layout, degrees, is_shared, stage_groups
from phalanx.spec.run import RunSpec

FOLDER = "measured"
STATE = ("parameters", "gradients", "optimizer", "offloaded")
PARTS = (*STATE, "activations", "communication")
WORKING = (*STATE, "working")
"""Ranks that share a model send each other activations: what came counts as communication when it is measured, and so
only both together say something."""
TOTAL = "total"
"""The most at one time, which is less than the most of each part: these come at different times."""
NOTE = (
    "bytes of the fullest rank, parts at the most of each, total at one time; of communication at most so much is "
    "predicted; sent: around a ring, of the operations asked for (on gloo a reduce-scatter is made of an all-to-all "
    "and a sum)"
)


def write_measured(directory: Path, rank: int, measured: dict[str, Any]) -> None:
    """Keep what a rank measured."""
    (directory / FOLDER).mkdir(exist_ok=True)
    (directory / FOLDER / f"rank-{rank:05d}.json").write_text(json.dumps(measured, indent=1))


def read_measured(directory: Path) -> list[dict[str, Any]]:
    """What each rank measured, in the order of ranks."""
    return [json.loads(file.read_text()) for file in sorted((directory / FOLDER).glob("rank-*.json"))]


def forget_measured(directory: Path) -> None:
    """Remove what was measured before; only rank 0 does, before any rank can have done a step."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.rmtree(directory / FOLDER, ignore_errors=True)


def compare(run: RunSpec, world_size: int, directory: Path) -> str:
    """Keep predicted beside measured in a run directory, and show it."""
    measured = read_measured(directory)
    if len(measured) < world_size:
        return "nothing was measured: the run had fewer steps"
    rows = beside(run, world_size, measured)
    (directory / FOLDER / "beside.json").write_text(json.dumps(rows, indent=1))
    unseen = "\nwhat PowerSGD sends is not recorded" if run.layout.compress == "powersgd" else ""
    unseen += "\nworking: activations and buffers" if is_shared(run.layout) else ""
    unseen += "\nall_to_all: predicted for balanced experts" if run.layout.ep > 1 else ""
    return f"{as_text(rows)}{unseen}\nmore, with times, in {directory / FOLDER}"


def beside(run: RunSpec, world_size: int, measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Predicted beside measured, of the fullest rank of each role: memory by part in bytes (state between the backward
    pass and the update, the rest at its peak), and what is sent, by operation."""
    memory, shared = rank_memory(run, world_size), is_shared(run.layout)
    traffic = run_traffic(run, world_size)
    rows = []
    for role, predicted in memory.items():
        ranks = [measured[rank] for rank in ranks_of(role, run.layout, world_size)]
        for part in WORKING if shared else PARTS:
            when = "held_bytes" if part in STATE else "peak_bytes"
            got = max(rank[when].get(part, 0) for rank in ranks)
            rows.append({"role": role, "what": part, "predicted": getattr(predicted, part), "measured": got})
        whole = max(rank["peak_bytes"]["total"] for rank in ranks)
        rows.append({"role": role, "what": TOTAL, "predicted": predicted.total, "measured": whole})
        # PowerSGD sends from callbacks of other threads, where nothing is recorded.
        sent = {} if run.layout.compress == "powersgd" else by_operation(traffic.get(role, []))
        for operation, size in sent.items():
            got = max(sent_with(rank["collectives"], operation) for rank in ranks)
            rows.append({"role": role, "what": operation, "predicted": round(size), "measured": round(got)})
    return rows


def ranks_of(role: str, layout: Layout, world_size: int) -> list[int]:
    """The ranks in a role of `rank_memory`."""
    sizes = degrees(layout, world_size)
    match role:
        case "rank":
            return list(range(world_size))
        case "server":
            return list(range(sizes.servers))
        case "worker":
            return list(range(sizes.servers, world_size))
        case _:
            place = int(role.removeprefix("pp"))
            return list(stage_groups(sizes)[place])


def by_operation(traffic: list[Traffic]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for row in traffic:
        total[row.operation] += row.bytes
    return total


def sent_with(collectives: list[dict[str, Any]], operation: str) -> float:
    """What a rank sent, or received, with an operation."""
    size = "bytes" if operation == "recv" else "sent_bytes"
    return sum(float(row[size]) for row in collectives if row["operation"] == operation)


def as_text(rows: list[dict[str, Any]]) -> str:
    """The comparison as lines."""
    lines = [f"{'':8} {'':14} {'predicted':>14} {'measured':>14}  measured / predicted"]
    for row in rows:
        share = f"{row['measured'] / row['predicted']:.3f}" if row["predicted"] else ""
        kind = "held" if row["what"] in (*PARTS, *WORKING, TOTAL) else "got" if row["what"] == "recv" else "sent"
        what = f"{row['role']:8} {kind:4} {row['what']:14}"
        lines.append(f"{what} {row['predicted']:>14,} {row['measured']:>14,}  {share}")
    return "\n".join([*lines, NOTE])
