"""`phalanx pipeline split`: layers and FLOPs of each pipeline stage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

import typer
from rich.table import Column

from phalanx.cli.common.options import Json, Overrides, RunFile
from phalanx.cli.common.text import print_line, text_table
from phalanx.cost.exact.pipeline_split import balance_stages, contiguous_ranges, layer_flops, stage_costs
from phalanx.schedule.registry import representative_schedule
from phalanx.spec.files.load import load_run
from phalanx.spec.terminal import Terminal


def split(
    run: RunFile,
    stages: Annotated[
        int | None, typer.Option(help="Total number of stages; default: those of the run's layout.", min=1, metavar="N")
    ] = None,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Show where the model is cut into stages, and why: by estimated FLOPs, embedding and head counted.

    Examples:

        phalanx pipeline split run.toml --stages 4

        phalanx pipeline split run.toml --stages 16 --set model.preset=llama3-8b --set training.seq_len=8192
    """
    described = load_run(run, set_ or [])
    number = stages or representative_schedule(described.layout).stages
    costs = layer_flops(described.model, described.training.seq_len)
    layers = balance_stages(costs, number)
    rows = stage_costs(costs, layers)
    # By number of layers alone, with the extra ones in the first stages
    boundaries = [-(-described.model.num_layers * stage // number) for stage in range(number + 1)]
    even = [end - start for start, end in pairwise(boundaries)]
    facts = {
        "stages": number,
        "layers": layers,
        "flops_per_token": rows,
        "slowest_over_mean": _imbalance(rows),
        "by_layers_alone": {"layers": even, "slowest_over_mean": _imbalance(stage_costs(costs, even))},
    }
    if json_:
        print(json.dumps(facts, indent=2))
    else:
        _explain(facts, costs)


def _imbalance(costs: Sequence[float]) -> float:
    return max(costs) * len(costs) / sum(costs)


def _explain(facts: dict[str, Any], costs: Sequence[float]) -> None:
    numbers = ("GFLOP per token", "share of the mean")
    table = text_table(Column("stage", justify="right"), "layers", numbers=numbers)
    mean = sum(facts["flops_per_token"]) / facts["stages"]
    stages = zip(contiguous_ranges(facts["layers"]), facts["flops_per_token"], strict=True)
    for stage, (layers, cost) in enumerate(stages):
        names = [f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])]
        names = ["embedding", *names] if stage == 0 else names
        names += ["head"] if stage == facts["stages"] - 1 else []
        table.add_row(str(stage), ", ".join(names), f"{cost / 1e9:.4g}", f"{cost / mean:.3f}")
    console = Terminal()
    console.print(table)
    alone = facts["by_layers_alone"]
    block = costs[1]
    lines = [
        f"the slowest stage limits the pipeline: {1 / facts['slowest_over_mean']:.1%} of an even cut",
        f"the head costs {costs[-1] / block:.2g} of a block",
        f"by layers alone ({' '.join(map(str, alone['layers']))}) it would be {1 / alone['slowest_over_mean']:.1%}",
    ]
    for line in lines:
        print_line(console, line)
