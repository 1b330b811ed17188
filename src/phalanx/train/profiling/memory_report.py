"""One step of a run measured from inside: what each rank held by part, and every collective; beside what was predicted.

RUN_DIR/measured/rank-00000.json      of each rank
RUN_DIR/measured/comparison.json          predicted beside measured"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch.distributed as dist

from phalanx.plan.predicted_vs_measured import PARTS, TOTAL, WORKING, Comparison, compare_with_prediction
from phalanx.runs.measured import COMPARISON_FILE, MEASURED_DIR, read_measured
from phalanx.spec.parallel_dims import uses_model_parallelism
from phalanx.spec.run import RunSpec

NOTE = (
    "bytes of the fullest rank, parts at the most of each, total at one time; of communication at most so much is "
    "predicted; sent: around a ring, of the operations asked for (on gloo a reduce-scatter is made of an all-to-all "
    "and a sum)"
)


def remove_measured(directory: Path) -> None:
    """Remove what was measured before; only rank 0 does, before any rank can have done a step."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.rmtree(directory / MEASURED_DIR, ignore_errors=True)


def write_comparison(run: RunSpec, world_size: int, directory: Path) -> str:
    """Keep predicted beside measured in a run directory, and show it."""
    measured = read_measured(directory)
    if len(measured) < world_size:
        return "nothing was measured: the run had fewer steps"
    rows = compare_with_prediction(run, world_size, dict(enumerate(measured)))
    (directory / MEASURED_DIR / COMPARISON_FILE).write_text(json.dumps([row.to_json() for row in rows], indent=1))
    unseen = "\nwhat PowerSGD sends is not recorded" if run.layout.gradient_compression == "powersgd" else ""
    unseen += "\nworking: activations and buffers" if uses_model_parallelism(run.layout) else ""
    unseen += "\nall_to_all: predicted for balanced experts" if run.layout.ep > 1 else ""
    return f"{format_rows(rows)}{unseen}\nmore, with times, in {directory / MEASURED_DIR}"


def format_rows(rows: list[Comparison]) -> str:
    """Return the comparison as lines of text."""
    lines = [f"{'':8} {'':14} {'predicted':>14} {'measured':>14}  measured / predicted"]
    for row in rows:
        ratio = f"{row.ratio:.3f}" if row.ratio is not None else ""
        kind = "held" if row.quantity in (*PARTS, *WORKING, TOTAL) else "got" if row.quantity == "recv" else "sent"
        label = f"{row.role:8} {kind:4} {row.quantity:14}"
        lines.append(f"{label} {row.predicted:>14,} {row.measured:>14,}  {ratio}")
    return "\n".join([*lines, NOTE])
