"""Output of `phalanx plan --nodes MIN:MAX`: a line for each number of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.cli.common.text import print_line
from phalanx.cli.views.plan import calibration_note, format_figures, plan_console, plan_table
from phalanx.cli.views.plan_notes import PREDICTED_TRAINER, describe_batch, print_assumptions, training_to_json
from phalanx.plan.search.result import EvaluatedLayout
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec


@dataclass(frozen=True)
class NodeCount:
    """The best layout on a number of nodes, or why there is none."""

    nodes: int
    ranks: int
    best: EvaluatedLayout | None = None
    problem: str = ""


def print_node_counts(run: RunSpec, planned: Sequence[NodeCount]) -> None:
    """Print a row for each number of nodes, with tokens/s per device relative to the first that fits."""
    console = plan_console()
    name = run.model_name
    for line in (
        f"{PREDICTED_TRAINER}: {name} on {run.cluster.preset or 'the cluster'}, {describe_batch(run)}; the "
        "layout that --out writes for each number of nodes",
        calibration_note(run.cluster),
        "",
    ):
        print_line(console, line)
    figures = ("step s", "80 % of steps", "tokens/s", "MFU", "GiB", "P(OOM)", "exposed", "bubble")
    table = plan_table("nodes", "layout", "ranks", "per rank", *figures)
    fitting = [count for count in planned if count.best is not None]
    for count in planned:
        if count.best is None:
            table.add_row(str(count.nodes), count.problem, f"{count.ranks:,}")
            continue
        per_rank = _tokens_per_rank(count) / _tokens_per_rank(fitting[0])
        cells = format_figures(run.cluster, count.best)
        table.add_row(str(count.nodes), str(count.best.candidate), f"{count.ranks:,}", f"{per_rank:.1%}", *cells)
    console.print(table)
    note = "per rank: tokens/s per rank, relative to the first row that fits. --nodes N shows all layouts of N nodes."
    print_line(console, f"\n{note}", "dim")
    best = [count.best for count in fitting if count.best is not None]
    print_assumptions(console, ResolvedRun(run, fitting[-1].ranks), best)


def _tokens_per_rank(count: NodeCount) -> float:
    return count.best.tokens_per_second / count.ranks if count.best else 0.0


def node_counts_to_json(run: RunSpec, planned: Sequence[NodeCount]) -> dict[str, Any]:
    """Return the output of `phalanx plan --nodes MIN:MAX --json`."""
    return {
        "trainer": "Phalanx",
        "model": run.model.source_name,
        **training_to_json(run),
        "node_counts": [
            {
                "nodes": count.nodes,
                "devices": count.ranks,
                "best": count.best and count.best.to_json(),
                "problem": count.problem,
            }
            for count in planned
        ],
    }
