"""`phalanx mesh`: the process groups of a run, and whether each is inside a node."""

from __future__ import annotations

import json
from typing import Any

from rich.text import Text

from phalanx.cli.common.options import Json, Overrides, Ranks, RunOrModel
from phalanx.cli.common.text import print_line
from phalanx.cost.exact.layout_checks import assume_no_recomputation, layout_error
from phalanx.spec.files.load import load_run
from phalanx.spec.formatting import plural
from phalanx.spec.parallel_dims import expert_parallel_groups, process_groups
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.terminal import Terminal

AXIS_MEANINGS = {
    "dp_replicate": "copies of the model",
    "dp_shard": "shards of one copy",
    "pp": "pipeline stages",
    "cp": "shards of a sequence",
    "tp": "shards of a matrix product",
    "ep": "groups of experts, over the ranks of a stage",
}


def mesh(run: RunOrModel, ranks: Ranks = None, set_: Overrides = None, json_: Json = False) -> None:
    """Show the groups of every axis: their ranks, and whether they stay inside a node.

    The command also checks that the run's model and batches can be divided in this way.

    Examples:

        phalanx mesh run.toml --ranks 16 --set layout.pp=4 --set layout.tp=2 --set cluster.nproc_per_node=8

        phalanx mesh run.toml --ranks 8 --set layout.data_parallel=hsdp --set layout.dp_shard=4 --json
    """
    run_spec = load_run(run, set_ or [])
    world_size = ranks or run_spec.cluster.ranks
    per_node = run_spec.cluster.nproc_per_node or world_size
    resolved = ResolvedRun(assume_no_recomputation(run_spec), world_size)
    sizes = resolved.dims
    groups_by_axis = {axis: process_groups(sizes, axis) for axis in sizes.axes} | {"ep": expert_parallel_groups(sizes)}
    axes = [
        {
            "axis": axis,
            "ranks": getattr(sizes, axis),
            "groups": [
                {"ranks": list(group), "inside_a_node": len({rank // per_node for rank in group}) == 1}
                for group in axis_groups
            ],
        }
        for axis, axis_groups in groups_by_axis.items()
        if getattr(sizes, axis) > 1
    ]
    error = layout_error(resolved)
    facts = {"ranks": world_size, "ranks_per_node": per_node, "servers": sizes.servers, "axes": axes}
    facts["problem"] = None if error is None else str(error)
    if json_:
        print(json.dumps(facts, indent=2))
    else:
        _print_groups(facts)


def _print_groups(facts: dict[str, Any]) -> None:
    console = Terminal()
    nodes = -(-facts["ranks"] // facts["ranks_per_node"])
    ranks_on_nodes = f"{facts['ranks']} ranks on {plural(nodes, 'node')}"
    servers = f", of which the first {facts['servers']} are servers" if facts["servers"] else ""
    print_line(console, f"{ranks_on_nodes}{servers}; axes outermost first")
    for axis in facts["axes"]:
        console.print()
        console.print(Text(axis["axis"], "bold") + f" {axis['ranks']}: {AXIS_MEANINGS[axis['axis']]}", soft_wrap=True)
        for group in axis["groups"]:
            members = " ".join(map(str, group["ranks"]))
            console.print(f"  {members}" + ("" if group["inside_a_node"] else "   crosses nodes"), highlight=False)
    if facts["problem"]:
        print_line(console, f"\nthis layout is not possible: {facts['problem']}", "yellow")
