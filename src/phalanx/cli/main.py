"""The `phalanx` command: one file per subcommand; each parses, calls one room, and prints."""

from __future__ import annotations

import sys

import typer

from phalanx import __version__
from phalanx.cli import data, experts, export, generate, info, init, memory, mesh, pipeline, plan, train
from phalanx.spec.errors import UserError

app = typer.Typer(
    name="phalanx",
    help="Plans, runs and verifies distributed training of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _version(shown: bool) -> None:
    if shown:
        print(f"phalanx {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


app.add_typer(data.app, name="data")
app.add_typer(pipeline.app, name="pipeline")
app.command("experts")(experts.experts)
app.command("export")(export.export)
app.command("generate")(generate.generate)
app.command("info")(info.info)
app.command("init")(init.init)
app.command("memory")(memory.memory)
app.command("mesh")(mesh.mesh)
app.command("plan")(plan.plan)
app.command("train")(train.train)


def main() -> None:
    """Run the command line; a UserError becomes a message on stderr and exit code 2."""
    try:
        app()
    except UserError as error:
        print(f"phalanx: {error}", file=sys.stderr)
        sys.exit(2)
