"""`phalanx advise`: rules of thumb next to the plan; `phalanx advise oom`: remedies for lack of memory."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from typer import Argument

from phalanx.cli.common.optional_part import command_with_part, split_part
from phalanx.cli.common.options import Json, Machine, Nodes, Nproc, Overrides

OOM = "oom"


def advise(
    first: Annotated[
        str,
        Argument(
            help="A run file, or a model as in `phalanx plan`. With `oom`: the run that exceeds its memory.",
            metavar="[oom] RUN.toml|MODEL",
        ),
    ],
    second: Annotated[str | None, Argument(hidden=True, metavar="RUN.toml")] = None,
    machine: Machine = None,
    nodes: Nodes = None,
    nproc: Nproc = None,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Show which published rules of thumb apply to a run, and whether the planner agrees: no GPU, no torch, seconds.

    With `oom`, show what frees memory in the run's own layout, cheapest first, what each change costs, and which make
    the run fit.

    Examples:

        phalanx advise run.toml --machine h100 --nodes 4

        phalanx advise run.toml --machine a100 --nodes 16 --set model.preset=llama3-70b --json

        phalanx advise oom run.toml --machine h100 --nproc 8

        phalanx advise oom run.toml --machine h100 --set layout.data_parallel=zero1 --set layout.micro_batch_size=4
    """
    fix = "write `phalanx advise run.toml` or `phalanx advise oom run.toml`"
    part, path = split_part("advise", first, second, [OOM], OOM, fix)
    from phalanx.cli.commands.plan_cluster import run_on_cluster

    if part is None:
        from phalanx.cli.views.advise import advice_to_json, print_advice
        from phalanx.plan.advice.compare_rules import advise as compare_rules

        resolved = run_on_cluster(path, machine, nodes, nproc, set_ or [])
        advice = compare_rules(resolved)
        if json_:
            print(json.dumps(advice_to_json(resolved.run, advice), indent=2))
        else:
            print_advice(resolved.run, advice)
        return
    from phalanx.cli.views.oom import oom_to_json, print_oom_advice
    from phalanx.cost.exact.layout_checks import require_planned_layout
    from phalanx.launch.recomputation import resolve_recomputation
    from phalanx.plan.advice.oom import diagnose
    from phalanx.spec.files.load import load_run

    require_planned_layout(load_run(path, set_ or []))
    resolved = run_on_cluster(path, machine, nodes, nproc, set_ or [])
    run = resolve_recomputation(resolved.run, resolved.world_size)
    diagnosis = diagnose(run)
    if json_:
        print(json.dumps(oom_to_json(run, diagnosis), indent=2))
    else:
        print_oom_advice(run, diagnosis)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
app.command("advise", cls=command_with_part(OOM))(advise)
