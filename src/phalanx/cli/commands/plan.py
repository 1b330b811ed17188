"""`phalanx plan`: ranked layouts with their time, memory and reasons; a subcommand for each other question."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from typer import Option

from phalanx.cli.commands.plan_cluster import rank_layouts, run_on_cluster
from phalanx.cli.commands.plan_explain import compare, explain
from phalanx.cli.commands.plan_export import export_layout
from phalanx.cli.commands.plan_nodes import parse_node_counts, show_node_counts
from phalanx.cli.commands.plan_predict import predict
from phalanx.cli.common.default_command import GroupWithDefault
from phalanx.cli.common.options import (
    AllSchedules,
    Json,
    Machine,
    Nodes,
    Nproc,
    Overrides,
    RunOrModel,
    Topology,
    counted_family_note,
)
from phalanx.cli.common.output_file import RUN_FILE, check_output_file
from phalanx.spec.errors import UserError

if TYPE_CHECKING:
    from phalanx.plan.search.result import EvaluatedLayout
    from phalanx.spec.run import RunSpec

DEFAULT_TOP = 10


class PlanGroup(GroupWithDefault):
    """The commands of `phalanx plan`."""

    moved_options: ClassVar[dict[str, str]] = {
        "--explain": "phalanx plan explain RUN.toml K",
        "--picture": "phalanx plan explain RUN.toml K --picture FILE",
        "--why-not": "phalanx plan compare RUN.toml LAYOUT",
        "--diff": "phalanx plan compare RUN.toml A B",
        "--web": "phalanx plan explore RUN.toml",
        "--port": "phalanx plan explore RUN.toml --port N",
        "--html": "phalanx plan explore RUN.toml --html FILE",
        "--export": "phalanx plan export RUN.toml --to TRAINER",
        "--batch": "phalanx plan predict RUNS.csv",
    }


app = typer.Typer(
    cls=PlanGroup,
    invoke_without_command=True,
    subcommand_metavar="| COMMAND ...",
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


@app.callback()
def plan(
    run: RunOrModel,
    machine: Machine = None,
    nodes: Annotated[
        str | None,
        Option(
            help="Number of nodes; default: cluster.nodes. A range shows the best layout of each number.",
            metavar="N|MIN:MAX",
        ),
    ] = None,
    nproc: Nproc = None,
    topology: Topology = None,
    top: Annotated[int | None, Option(help=f"Number of layouts to show; default: {DEFAULT_TOP}.", min=1)] = None,
    all_: AllSchedules = False,
    tokens: Annotated[
        float | None, Option(help="Training tokens for days, energy and cost; default: the run's.", min=1)
    ] = None,
    mtbf: Annotated[
        str | None,
        Option(
            help="Mean time between failures of a node, with unit s, m, h or d: sets cluster.failures_per_device_hour.",
            metavar="TIME",
        ),
    ] = None,
    out: Annotated[Path | None, Option(help="Write a run file with the best layout.", metavar="FILE")] = None,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Rank all parallel layouts of a run on a cluster, in seconds and without a GPU.

    Examples:

        phalanx plan run.toml --machine h100 --nodes 16

        phalanx plan run.toml --machine h100 --nodes 2048 --tokens 15e12 --set cluster.storage_bytes_per_second=1e12

        phalanx plan llama3-8b --machine h100 --nodes 8 --mtbf 8d

        phalanx plan run.toml --machine h100 --nodes 8:64

        phalanx plan run.toml --machine h100 --nodes 16 --out planned.toml

        phalanx plan explain run.toml 1 --machine h100 --nodes 16 --picture step.svg

        phalanx plan compare run.toml "tp=16,pp=2,data_parallel=zero1" --machine h100 --nodes 16

        phalanx plan explore run.toml --machine h100 --nodes 16

        phalanx plan export run.toml --to megatron --machine a100 --nodes 8

        phalanx plan predict runs.csv --json
    """
    if out is not None:
        check_output_file("--out", out, run, RUN_FILE)
    num_nodes, *more_counts = parse_node_counts(nodes)
    load = partial(run_on_cluster, run, machine, nproc=nproc, overrides=set_ or [], topology=topology)
    if more_counts:
        # A range of nodes has one layout for each number.
        for option, value in {
            "--top": top,
            "--all": all_ or None,
            "--tokens": tokens,
            "--mtbf": mtbf,
            "--out": out,
        }.items():
            if value is not None:
                problem = f"is a range, which cannot be combined with {option}"
                raise UserError("--nodes", nodes, problem, fix=f"remove {option}, or give one number of nodes")
        show_node_counts(load, [num_nodes, *more_counts], as_json=json_)
        return
    resolved = load(num_nodes)
    if mtbf is not None:
        node_failures_per_hour = 3600 / _parse_duration("--mtbf", mtbf)
        cluster = resolved.run.cluster
        cluster = cluster.replace(failures_per_device_hour=node_failures_per_hour / (cluster.nproc_per_node or 1))
        resolved = replace(resolved, run=resolved.run.replace(cluster=cluster))
    num_shown = top or DEFAULT_TOP
    ranked = rank_layouts(resolved, num_shown, all_schedules=all_)
    # Before any output, which a pager may cut off
    if out is not None:
        _write_planned_run(resolved.run, ranked.best, out, source=run)
    if json_:
        import json

        from phalanx.cli.views.plan_json import plan_to_json

        print(json.dumps(plan_to_json(resolved, ranked, top=num_shown, tokens=tokens), indent=2))
    else:
        from phalanx.cli.views.plan import print_layout_table

        print_layout_table(resolved, ranked, top=num_shown, tokens=tokens)


app.command()(explain)
app.command()(compare)


@app.command()
def explore(
    run: RunOrModel,
    html: Annotated[Path | None, Option(help="Write the page to a file instead of serving it.", metavar="FILE")] = None,
    port: Annotated[
        int | None, Option(help="Port to serve; default: any free port.", min=0, max=65535, metavar="N")
    ] = None,
    all_: AllSchedules = False,
    machine: Machine = None,
    nodes: Nodes = None,
    nproc: Nproc = None,
    topology: Topology = None,
    set_: Overrides = None,
) -> None:
    """Show and compare all layouts in a web page.

    The page is served to this machine until Ctrl-C, and can plan again with other choices. A file shows one plan.

    Examples:

        phalanx plan explore run.toml --machine h100 --nodes 16

        phalanx plan explore run.toml --machine h100 --nodes 16 --html plan.html
    """
    from phalanx.cli.commands.plan_explorer import PlanArguments, serve_page, write_page

    arguments = PlanArguments(
        run=run,
        machine=machine,
        nodes=nodes,
        nproc=nproc,
        overrides=tuple(set_ or ()),
        topology=topology,
        all_schedules=all_,
    )
    if html is None:
        serve_page(arguments, port or 0)
        return
    if port is not None:
        raise UserError("--port", port, "cannot be combined with --html", fix="remove --port, or --html to serve")
    check_output_file("--html", html, run, "html")
    write_page(arguments, html)


app.command("export")(export_layout)
app.command()(predict)


def _parse_duration(option: str, text: str) -> float:
    """Return the seconds of a duration such as "90s", "30m", "8h" or "2d"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([smhd])", text)
    seconds = float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[match[2]] if match else 0.0
    if not seconds:
        raise UserError(option, text, "is not a duration", fix="write a number with its unit: 90s, 30m, 8h or 2d")
    return seconds


def _with_best_checkpoint_interval(run: RunSpec, planned: EvaluatedLayout) -> tuple[RunSpec, str | None]:
    """Return the run with the checkpoint interval that the plan's goodput assumes, and the note that says why.

    The run is unchanged, without a note, if it sets an interval, keeps checkpoints of certain steps, or has no failure
    rate of its own.
    """
    from phalanx.plan.training_cost import estimate_training_cost
    from phalanx.spec.formatting import format_duration
    from phalanx.spec.resolved_run import ResolvedRun

    checkpoint = run.checkpoint
    is_decided = "every" in checkpoint.model_fields_set or checkpoint.keep.every or checkpoint.keep.best
    if is_decided or not run.cluster.failures_per_device_hour:
        return run, None
    cost = estimate_training_cost(ResolvedRun.on_cluster(run), planned)
    note = (
        f"checkpoint.every = {cost.interval_steps}: the best goodput ({cost.goodput:.1%}) with a failure every "
        f"{format_duration(cost.mtbf_seconds)} needs a checkpoint every {format_duration(cost.interval_seconds)}"
    )
    return run.replace(checkpoint=checkpoint.replace(every=cost.interval_steps)), note


def _new_weights_note(source: Path) -> str | None:
    """Return why a run of a Hugging Face config.json starts from new weights; None for other sources."""
    from phalanx.spec.files.load import lacks_weights, model_source

    if (note := counted_family_note(source)) is not None:
        return note
    is_config = "from_hf" in (model_source(source) or {})
    return f"{source}: has no *.safetensors" if is_config and lacks_weights(source) else None


def _write_planned_run(run: RunSpec, planned: EvaluatedLayout, file: Path, source: Path) -> None:
    """Write the run with a layout, ready to train; `source` is its run file or model."""
    from phalanx.cli.common.output_file import write_file
    from phalanx.launch.jobs.job import PORT
    from phalanx.plan.search.phases import layout_of_run
    from phalanx.spec.files.write import to_toml
    from phalanx.spec.formatting import WRITTEN_BY, printable
    from phalanx.spec.learning_rate import learning_rate_note
    from phalanx.spec.small_run_defaults import unset_choices_of_large_model

    run, interval_note = _with_best_checkpoint_interval(run, planned)
    omitted, unset_note = unset_choices_of_large_model(run)
    if (weights_note := _new_weights_note(source)) is not None:
        weights_note += "; this run trains Phalanx's transformer of these sizes from new weights"
    notes = [note for note in (weights_note, learning_rate_note(run), interval_note, unset_note) if note]
    # A comment of TOML is one line without control characters, which a path may have.
    comments = [f"# {printable(' '.join(line.splitlines()))}\n" for line in (f"{WRITTEN_BY} plan", *notes)]
    toml_text = to_toml(run.replace(layout=layout_of_run(run, planned.candidate.layout())), omitted)
    write_file("--out", file, f"{''.join(comments)}{toml_text}")
    name = shlex.quote(str(file))
    start = f"phalanx train {name}"
    if run.cluster.nodes > 1:
        start += f" --rendezvous FIRST_NODE:{PORT} on each node"
        start += f", or phalanx launch {name} --to slurm|kubernetes|skypilot"
    purpose = "start it" if weights_note is None else "train from new weights, not those of the model,"
    print(f"wrote {file} ({planned.candidate}, P(OOM) {planned.p_oom:.1%}); {purpose} with {start}", file=sys.stderr)
    for note in notes:
        print(note, file=sys.stderr)
