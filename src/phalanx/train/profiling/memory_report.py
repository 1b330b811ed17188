"""One step of a run measured from inside: what each rank held by part, and every collective; beside what was predicted.

RUN_DIR/measured/rank-00000.json      of each rank
RUN_DIR/measured/comparison.json          predicted beside measured"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from phalanx.plan.predicted_vs_measured import PARTS, TOTAL, WORKING, compare_with_prediction
from phalanx.spec.degrees import uses_model_parallelism
from phalanx.spec.run import RunSpec

FOLDER = "measured"
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


def remove_measured(directory: Path) -> None:
    """Remove what was measured before; only rank 0 does, before any rank can have done a step."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.rmtree(directory / FOLDER, ignore_errors=True)


def write_comparison(run: RunSpec, world_size: int, directory: Path) -> str:
    """Keep predicted beside measured in a run directory, and show it."""
    measured = read_measured(directory)
    if len(measured) < world_size:
        return "nothing was measured: the run had fewer steps"
    rows = compare_with_prediction(run, world_size, dict(enumerate(measured)))
    (directory / FOLDER / "comparison.json").write_text(json.dumps(rows, indent=1))
    unseen = "\nwhat PowerSGD sends is not recorded" if run.layout.gradient_compression == "powersgd" else ""
    unseen += "\nworking: activations and buffers" if uses_model_parallelism(run.layout) else ""
    unseen += "\nall_to_all: predicted for balanced experts" if run.layout.ep > 1 else ""
    return f"{format_rows(rows)}{unseen}\nmore, with times, in {directory / FOLDER}"


def format_rows(rows: list[dict[str, Any]]) -> str:
    """The comparison as lines."""
    lines = [f"{'':8} {'':14} {'predicted':>14} {'measured':>14}  measured / predicted"]
    for row in rows:
        share = f"{row['measured'] / row['predicted']:.3f}" if row["predicted"] else ""
        kind = "held" if row["what"] in (*PARTS, *WORKING, TOTAL) else "got" if row["what"] == "recv" else "sent"
        what = f"{row['role']:8} {kind:4} {row['what']:14}"
        lines.append(f"{what} {row['predicted']:>14,} {row['measured']:>14,}  {share}")
    return "\n".join([*lines, NOTE])
