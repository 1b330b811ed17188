"""`phalanx plan export`: the best layout that another trainer can express, as its configuration."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from typer import Option

from phalanx.cli.commands.plan_cluster import MIN_SEARCHED, rank_layouts, run_on_cluster
from phalanx.cli.common.options import Machine, Nodes, Nproc, Overrides, RunOrModel, Topology
from phalanx.cli.common.progress import search_progress

if TYPE_CHECKING:
    from phalanx.plan.export.common import Trainer
    from phalanx.plan.search.result import EvaluatedLayout
    from phalanx.spec.resolved_run import ResolvedRun


def export_layout(
    run: RunOrModel,
    to: Annotated[
        str, Option(help="Trainer: megatron, torchtitan, automodel, deepspeed or nanotron.", metavar="TRAINER")
    ],
    machine: Machine = None,
    nodes: Nodes = None,
    nproc: Nproc = None,
    topology: Topology = None,
    set_: Overrides = None,
) -> None:
    """Print the best layout as the configuration of another trainer.

    Examples:

        phalanx plan export run.toml --to megatron --machine a100 --nodes 8
    """
    from phalanx.plan.export.common import TRAINER_NAMES
    from phalanx.plan.export.export import check_run, export, require_known_trainer, search_exportable
    from phalanx.spec.errors import UserError
    from phalanx.spec.formatting import format_gib

    resolved = run_on_cluster(run, machine, nodes, nproc, set_ or [], topology)
    trainer = require_known_trainer(to, "--to")
    check_run(resolved.run, trainer)
    with search_progress(resolved.world_size) as report:
        evaluated = search_exportable(resolved, trainer, keep=MIN_SEARCHED, report=report).best
    try:
        exported = export(resolved.with_layout(evaluated.candidate.layout()), trainer)
    except UserError as error:
        problem = f"cannot express any layout of this run that fits; for the fastest, {error.field} {error.problem}"
        raise UserError("--to", trainer, problem, fix=error.fix) from None
    print(exported.text)
    figures = f"{evaluated.step_seconds:.3f} s a step and {format_gib(evaluated.memory_bytes)} a rank"
    note = f"are Phalanx's figures for this layout; those of {TRAINER_NAMES[trainer]} are not predicted"
    print(f"{evaluated.candidate}: {figures} {note}", file=sys.stderr)
    for note in (*exported.notes, *_explain_not_best(resolved, evaluated, trainer)):
        print(f"note: {note}", file=sys.stderr)


def _explain_not_best(resolved: ResolvedRun, exported: EvaluatedLayout, trainer: Trainer) -> list[str]:
    """Explain why the exported layout is not the planner's best, if the trainer cannot express that."""
    from phalanx.plan.export.export import export
    from phalanx.spec.errors import UserError

    best = rank_layouts(resolved).best
    if best.candidate == exported.candidate:
        return []
    try:
        export(resolved.with_layout(best.candidate.layout()), trainer)
    except UserError as error:
        reason = f"{error.field} = {error.value} {error.problem}"
        return [f"The best layout for Phalanx is {best.candidate} ({best.step_seconds:.3f} s): {reason}."]
    return []
