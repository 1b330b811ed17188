"""`phalanx experts`: how evenly tokens choose the experts of a run, and which of these should stand on one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from phalanx.cli.options import Json
from phalanx.cost.placement import balanced, busiest_rank
from phalanx.spec.base import divisors, require
from phalanx.spec.errors import UserError
from phalanx.spec.load import load_run
from phalanx.spec.model import ModelSpec
from phalanx.train.manifest import newest_intact, read_manifest
from phalanx.train.metrics import append_record, read_metrics


def experts(
    run: Annotated[Path, typer.Argument(help="The directory of a run of a mixture of experts.", metavar="RUN_DIR")],
    ep: Annotated[int, typer.Option(help="Ranks that have different experts (layout.ep).", min=1)],
    balance: Annotated[
        bool, typer.Option("--balance", help="Renumber experts so that ranks have as much to do.")
    ] = False,
    order: Annotated[
        Path | None, typer.Option(help="Renumber them as a JSON file says: for each layer by name, its order.")
    ] = None,
    json_: Json = False,
) -> None:
    """Show what the experts of a run have had to do, by layer and by rank, and change which of them share a rank.

    Rank r has the r-th run of a layer's experts, by number. Experts that change their numbers together with their rows
    of the router leave the model what it was: the newest checkpoint is written anew so (the one before is kept beside
    it as step-N.before), and --resume goes on with it. Not while the run is under way. The loads are those since the
    evaluation before the last, from metrics.jsonl. It takes as much memory as the checkpoint has bytes.

    Examples:

        phalanx experts runs/moe --ep 4                   # the busiest rank of every layer, as it is and balanced

        phalanx experts runs/moe --ep 4 --balance && phalanx train runs/moe/run.toml --resume --set layout.ep=4

        phalanx experts runs/moe --ep 4 --json > loads.json

        echo '{"0": [3, 1, 0, 2]}' > order.json; phalanx experts runs/moe --ep 2 --order order.json
    """
    require(not (balance and order), "--order", str(order), "does not go with --balance", "remove one of them")
    spec = load_run(run / "run.toml", environment={}).model
    loads = _loads(run, spec, ep)
    orders = {layer: balanced(tokens, ep) for layer, tokens in loads.items()}
    if order is not None:
        orders = _read_order(order, loads)
    rows = [
        {
            "layer": layer,
            "tokens": tokens,
            "busiest_rank": busiest_rank(tokens, range(len(tokens)), ep),
            "then": busiest_rank(tokens, orders.get(layer, range(len(tokens))), ep),
            "order": orders.get(layer, list(range(len(tokens)))),
        }
        for layer, tokens in loads.items()
    ]
    before = _renumber(run, loads, orders) if balance or order else None
    if json_:
        print(json.dumps({"ep": ep, "layers": rows, "before": before and str(before)}, indent=2))
    else:
        _show(rows, ep, before, "in that order" if order else "balanced")


def _loads(run: Path, spec: ModelSpec, ep: int) -> dict[int, list[int]]:
    """Tokens that chose each expert, by layer."""
    if spec.moe is None:
        raise UserError("run directory", str(run), "is of a model without experts", "give one with [model.moe]")
    number = spec.moe.experts
    fix = f"use one of {', '.join(map(str, divisors(number)))}"
    require(number % ep == 0, "--ep", ep, f"does not divide model.moe.experts ({number})", fix)
    counted = [record["expert_tokens"] for record in read_metrics(run) if "expert_tokens" in record]
    if not counted:
        problem = "has no evaluation yet, whose records count the tokens of experts"
        raise UserError("run directory", str(run), problem, "let the run reach its first evaluation")
    layers = [layer for layer in range(spec.layers) if spec.is_moe(layer)]
    return dict(zip(layers, counted[-1], strict=True))


def _read_order(file: Path, loads: dict[int, list[int]]) -> dict[int, list[int]]:
    """Orders of experts by layer; raises UserError for what is none."""
    try:
        table = json.loads(file.read_text())
        orders = {int(layer): [int(expert) for expert in order] for layer, order in table.items()}
    except OSError as error:
        raise UserError("--order", str(file), f"cannot be read: {error.strerror}", "name a JSON file") from None
    except (ValueError, TypeError, AttributeError):
        fix = 'write {"0": [3, 1, 0, 2], "1": [0, 2, 1, 3]}'
        raise UserError("--order", str(file), "is not a JSON object of lists of experts", fix) from None
    for layer, order in orders.items():
        known = ", ".join(map(str, loads))
        require(layer in loads, "--order", layer, "is not a layer with experts", f"use one of {known}")
        every = sorted(order) == list(range(len(loads[layer])))
        problem, fix = f"of layer {layer} does not name each expert once", f"name 0 to {len(loads[layer]) - 1}"
        require(every, "--order", order, problem, fix)
    return orders


def _renumber(run: Path, loads: dict[int, list[int]], orders: dict[int, list[int]]) -> Path:
    checkpoint, _ = newest_intact(run / "checkpoints")
    if checkpoint is None:
        raise UserError("run directory", str(run), "has no intact checkpoint", "let the run reach its first checkpoint")
    from phalanx.train.renumber import renumber  # torch takes seconds to import

    before = renumber(checkpoint, orders)
    # From now on the loads that were counted are of other numbers.
    then = [[tokens[i] for i in orders.get(layer, range(len(tokens)))] for layer, tokens in loads.items()]
    append_record(run, {"step": read_manifest(checkpoint)["step"], "expert_tokens": then})
    return before


def _show(rows: list[dict[str, Any]], ep: int, before: Path | None, how: str) -> None:
    console = Console()
    table = Table(title=f"tokens of experts on {ep} ranks (1.00: as many for each)", title_justify="left")
    for column in ("layer", "busiest expert", "busiest rank", how, "order"):
        table.add_column(column, justify="left" if column == "order" else "right", no_wrap=column != "order")
    for row in rows:
        tokens, size = row["tokens"], len(row["order"]) // ep
        runs = [row["order"][first : first + size] for first in range(0, len(row["order"]), size)]
        table.add_row(
            str(row["layer"]), f"{max(tokens) * len(tokens) / max(1, sum(tokens)):.2f}", f"{row['busiest_rank']:.2f}",
            f"{row['then']:.2f}", " | ".join(" ".join(map(str, mine)) for mine in runs),
        )  # fmt: skip
    console.print(table)
    if before is not None:
        console.print(f"renumbered; the checkpoint before is {before}", soft_wrap=True, highlight=False)
