"""Comparison of one measured step with the prediction: memory by part, and every collective.

RUN_DIR/measured/rank-00000.json      one file per rank
RUN_DIR/measured/comparison.json      predicted and measured values"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from phalanx.parallel.comm.objects import rank_and_world_size
from phalanx.plan.predicted_vs_measured import PARTS, TEACHER, TOTAL, WORKING, Comparison, compare_with_prediction
from phalanx.runs.measured import COMPARISON_FILE, MEASURED_DIR, read_measured
from phalanx.spec.files.replace import replace_file
from phalanx.spec.parallel_dims import uses_model_parallelism
from phalanx.spec.resolved_run import ResolvedRun

NOTE = (
    "bytes of the rank with the most memory; each part at its own peak, the total at one time. Communication: an upper "
    "bound is predicted. sent: with ring algorithms, for the requested operations (on gloo a reduce-scatter is an "
    "all-to-all and a sum)"
)


def remove_measured(directory: Path) -> None:
    """Remove earlier measurements, on rank 0, before any rank can have finished a step."""
    if rank_and_world_size()[0] == 0:
        shutil.rmtree(directory / MEASURED_DIR, ignore_errors=True)


def write_comparison(resolved: ResolvedRun, directory: Path) -> str:
    """Write predicted and measured values to a run directory, and return them as text."""
    run = resolved.run
    measured = read_measured(directory)
    if len(measured) < resolved.world_size:
        return "nothing was measured: the run ended before the measured step"
    rows = compare_with_prediction(resolved, dict(enumerate(measured)))
    replace_file(directory / MEASURED_DIR / COMPARISON_FILE, json.dumps([row.to_json() for row in rows], indent=1))
    notes = "\nthe traffic of PowerSGD is not recorded" if run.layout.gradient_compression == "powersgd" else ""
    notes += "\nworking: activations and buffers" if uses_model_parallelism(run.layout) else ""
    notes += "\nall_to_all: predicted for balanced experts" if run.layout.ep > 1 else ""
    return f"{format_rows(rows)}{notes}\ndetails and times: {directory / MEASURED_DIR}"


def format_rows(rows: list[Comparison]) -> str:
    """Return the comparison as lines of text."""
    lines = [f"{'':8} {'':14} {'predicted':>14} {'measured':>14}  measured / predicted"]
    for row in rows:
        ratio = f"{row.ratio:.3f}" if row.ratio is not None else ""
        verb = "got" if row.quantity == "recv" else "sent"
        if row.quantity in (*PARTS, *WORKING, TEACHER, TOTAL):
            verb = "held"
        label = f"{row.role:8} {verb:4} {row.quantity:14}"
        lines.append(f"{label} {row.predicted:>14,} {row.measured:>14,}  {ratio}")
    return "\n".join([*lines, NOTE])
