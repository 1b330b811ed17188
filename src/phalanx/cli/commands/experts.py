"""`phalanx experts`: the load of each expert in a run, and the assignment of experts to ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table
from typer import Argument, Option

from phalanx.cli.common.options import Json
from phalanx.cost.formulas.expert_placement import balanced_expert_order, max_rank_load
from phalanx.runs.checkpoints import read_manifest, require_valid_checkpoint
from phalanx.runs.create import RUN_FILE, require_run
from phalanx.spec.base import divisors, require
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run
from phalanx.spec.files.tables import parse_json
from phalanx.spec.layers import expert_layers
from phalanx.spec.terminal import Terminal

Loads = dict[int, list[int]]


def experts(
    run: Annotated[Path, Argument(help="Run directory of a mixture-of-experts model.", metavar="RUN_DIR")],
    ep: Annotated[int | None, Option(help="Expert-parallel ranks; default: the run's layout.ep.", min=1)] = None,
    balance: Annotated[
        bool, Option("--balance", help="Renumber experts so that ranks have nearly equal loads.")
    ] = False,
    order: Annotated[
        Path | None, Option(help="Renumber experts by a JSON file: layer number -> order of its experts.")
    ] = None,
    json_: Json = False,
) -> None:
    """Show the tokens per expert of a run, by layer and rank, and renumber experts to balance ranks.

    Rank r holds the r-th block of a layer's experts, by number. Renumbering experts together with their rows of the
    router does not change the model: the newest checkpoint is rewritten (the old one is kept as step-N.before), and
    --resume continues with it. The run must not be active. Tokens are counted between the last two evaluations. The
    whole checkpoint is loaded into memory.

    Examples:

        phalanx experts runs/moe --ep 4                   # the busiest rank of every layer, as it is and balanced

        phalanx experts runs/moe --ep 4 --balance && phalanx train runs/moe --resume --set layout.ep=4

        phalanx experts runs/moe --ep 4 --json > loads.json

        echo '{"0": [3, 1, 0, 2]}' > order.json; phalanx experts runs/moe --ep 2 --order order.json
    """
    problem = "cannot be combined with --balance"
    require(not (balance and order), "--order", str(order), problem, fix="remove one of them")
    require_run(run)
    run_spec = load_run(run / RUN_FILE, environment={})
    model = run_spec.model
    ranks = ep or run_spec.layout.ep
    if model.moe is None:
        fix = "give the directory of a run with model.moe"
        raise UserError("run directory", str(run), "has a model without experts", fix=fix)
    problem = f"does not divide model.moe.num_experts ({model.moe.num_experts})"
    fix = f"use one of {', '.join(map(str, divisors(model.moe.num_experts)))}"
    require(model.moe.num_experts % ranks == 0, "--ep", ranks, problem, fix)
    problem = "chooses experts in groups, which another order of the experts would change"
    require(model.moe.num_groups == 1, "model.moe.num_groups", model.moe.num_groups, problem, "keep their order")
    checkpoint = require_valid_checkpoint(run)
    manifest = read_manifest(checkpoint)
    if "expert_tokens" not in manifest:
        fix = "resume the run, and save another checkpoint"
        raise UserError("checkpoint", str(checkpoint), "does not record tokens per expert", fix=fix)
    # Tokens between the last two evaluations, or up to now if there were none
    until_now, before_last = manifest["expert_tokens"]
    layers = expert_layers(model)
    loads: Loads = dict(zip(layers, before_last if any(map(sum, before_last)) else until_now, strict=True))
    if order is None:
        orders = {layer: balanced_expert_order(tokens, ranks) for layer, tokens in loads.items()}
    else:
        orders = {layer: list(range(len(tokens))) for layer, tokens in loads.items()} | _read_order(order, loads)
    rows = [
        {
            "layer": layer,
            "tokens": tokens,
            "busiest_rank": max_rank_load(tokens, range(len(tokens)), ranks),
            "busiest_rank_after": max_rank_load(tokens, orders[layer], ranks),
            "order": orders[layer],
        }
        for layer, tokens in loads.items()
    ]
    before = None
    if balance or order:
        from phalanx.train.checkpoint.reorder_experts import reorder_experts  # torch takes seconds to import

        before = reorder_experts(checkpoint, orders)
    if json_:
        print(json.dumps({"ep": ranks, "layers": rows, "before": before and str(before)}, indent=2))
    else:
        _print_loads(rows, ranks, before, order_label="in that order" if order else "balanced")


def _read_order(file: Path, loads: Loads) -> Loads:
    """Return the orders of experts by layer. Raises UserError if the file contains something else."""
    fix = 'write {"0": [3, 1, 0, 2], "1": [0, 2, 1, 3]}'
    try:
        table = parse_json(file.read_bytes())
    except OSError as error:
        raise UserError("--order", str(file), f"cannot be read: {error.strerror}", fix="give a JSON file") from None
    except ValueError:
        raise UserError("--order", str(file), "is not JSON", fix=fix) from None
    require(isinstance(table, dict), "--order", str(file), "is not a JSON object of lists of experts", fix)
    names = {str(layer): layer for layer in loads}
    for layer, order in table.items():
        problem = f"orders the experts of {layer}, which is not a layer with experts"
        require(layer in names, "--order", str(file), problem, fix=f"use {', '.join(names)}")
        is_int_list = isinstance(order, list) and all(type(expert) is int for expert in order)
        is_permutation = is_int_list and sorted(order) == list(range(len(loads[names[layer]])))
        max_expert = len(loads[names[layer]]) - 1
        problem = f"does not contain each expert of layer {layer} exactly once: {order}"
        require(is_permutation, "--order", str(file), problem, fix=f"list 0 to {max_expert}")
    return {names[layer]: order for layer, order in table.items()}


def _print_loads(rows: list[dict[str, Any]], ep: int, before: Path | None, order_label: str) -> None:
    console = Terminal()
    table = Table(title=f"tokens of experts on {ep} ranks (1.00: as many for each)", title_justify="left")
    for column in ("layer", "busiest expert", "busiest rank", order_label, "order"):
        table.add_column(column, justify="left" if column == "order" else "right", no_wrap=column != "order")
    for row in rows:
        tokens = row["tokens"]
        size = len(row["order"]) // ep
        expert_ranges = [row["order"][first : first + size] for first in range(0, len(row["order"]), size)]
        table.add_row(
            str(row["layer"]),
            f"{max(tokens) * len(tokens) / max(1, sum(tokens)):.2f}",
            f"{row['busiest_rank']:.2f}",
            f"{row['busiest_rank_after']:.2f}",
            " | ".join(" ".join(map(str, rank_experts)) for rank_experts in expert_ranges),
        )
    console.print(table)
    if before is not None:
        console.print(f"renumbered; the checkpoint before is {before}", soft_wrap=True, highlight=False)
