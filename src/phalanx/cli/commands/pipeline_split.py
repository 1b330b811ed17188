"""`phalanx pipeline split`: layers and FLOPs of each pipeline stage."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Annotated

from rich.table import Column
from typer import Option

from phalanx.cli.common.options import Json, Overrides, RunOrModel
from phalanx.cli.common.text import print_line, text_table
from phalanx.program.pipeline_split import balance_stages, contiguous_ranges, layer_flops, stage_costs
from phalanx.schedule.registry import representative_schedule
from phalanx.spec.files.load import load_run
from phalanx.spec.terminal import Terminal


def split(
    run: RunOrModel,
    stages: Annotated[
        int | None, Option(help="Total number of stages; default: those of the run's layout.", min=1, metavar="N")
    ] = None,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Show where the model is cut into stages, and why: by estimated FLOPs, embedding and head counted.

    Examples:

        phalanx pipeline split run.toml --stages 4

        phalanx pipeline split run.toml --stages 16 --set model.preset=llama3-8b --set training.seq_len=8192
    """
    run_spec = load_run(run, set_ or [])
    number = stages or representative_schedule(run_spec.layout).stages
    costs = layer_flops(run_spec.model, run_spec.training.seq_len)
    layers = balance_stages(costs, number)
    rows = stage_costs(costs, layers)
    # By number of layers alone, with the extra ones in the first stages
    boundaries = [-(-run_spec.model.num_layers * stage // number) for stage in range(number + 1)]
    even = [end - start for start, end in pairwise(boundaries)]
    slowest_over_mean, even_slowest = (max(cut) * number / sum(cut) for cut in (rows, stage_costs(costs, even)))
    if json_:
        facts = {
            "stages": number,
            "layers": layers,
            "flops_per_token": rows,
            "slowest_over_mean": slowest_over_mean,
            "by_layers_alone": {"layers": even, "slowest_over_mean": even_slowest},
        }
        print(json.dumps(facts, indent=2))
        return
    end = "head with multi-token prediction" if run_spec.model.mtp else "head"
    table = text_table(Column("stage", justify="right"), "layers", numbers=("GFLOP per token", "share of the mean"))
    for stage, (stage_layers, cost) in enumerate(zip(contiguous_ranges(layers), rows, strict=True)):
        names = [f"{stage_layers[0]}-{stage_layers[-1]}" if len(stage_layers) > 1 else str(stage_layers[0])]
        names = ["embedding", *names] if stage == 0 else names
        names += [end] if stage == number - 1 else []
        table.add_row(str(stage), ", ".join(names), f"{cost / 1e9:.4g}", f"{cost * number / sum(rows):.3f}")
    console = Terminal()
    console.print(table)
    for line in (
        f"the slowest stage limits the pipeline: {1 / slowest_over_mean:.1%} of an even cut",
        f"the {end} costs {costs[-1] / costs[1]:.2g} of a block",
        f"by layers alone ({' '.join(map(str, even))}) it would be {1 / even_slowest:.1%}",
    ):
        print_line(console, line)
