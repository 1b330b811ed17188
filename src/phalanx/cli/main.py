"""The `phalanx` command: one file per subcommand; each parses, calls one room, and prints."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from phalanx import __version__
from phalanx.cli.common.usage_errors import translate_usage_errors
from phalanx.spec.errors import UserError

COMMANDS = (
    "data",
    "pipeline",
    "advise",
    "calibrate",
    "debug",
    "doctor",
    "dryrun",
    "experts",
    "export",
    "generate",
    "info",
    "init",
    "launch",
    "memory",
    "measure",
    "mesh",
    "placement",
    "plan",
    "report",
    "swarm",
    "train",
    "watch",
)
"""Each a file beside this one with a function of its name, or with an `app` of several."""


class LazyCommandGroup(TyperGroup):
    """Commands whose files are imported when they are asked for, so that each starts without the others."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False  # typer imports all of pydantic to learn what None is as a bool
        return option

    listing = False
    """Whether commands are asked for only to say in a line what each does."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self.listing = False

    def make_context(self, *args: Any, **extra: Any) -> Any:
        with translate_usage_errors():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        with translate_usage_errors():
            return super().invoke(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            from phalanx.spec.base import did_you_mean  # with pydantic, which a command's help does not need

            raise UserError("command", cmd_name, "is not known", did_you_mean(cmd_name, list(COMMANDS)))
        if self.listing:
            return TyperCommand(cmd_name, help=command_help(cmd_name))
        file = import_module(f"phalanx.cli.commands.{cmd_name}")
        own = getattr(file, "app", None)
        if own is None:
            own = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
            own.command(cmd_name)(getattr(file, cmd_name))
        command = typer.main.get_command(own)
        command.name = cmd_name
        return command


def command_help(name: str) -> str:
    """A command's help, read from its file: that of its function, or of its `app`. To import all of these files takes
    several times as long as all else that lists them."""
    tree = ast.parse((Path(__file__).parent / "commands" / f"{name}.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return ast.get_docstring(node) or ""
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "app" and isinstance(node.value, ast.Call):
            for word in node.value.keywords:
                if word.arg == "help":
                    return str(ast.literal_eval(word.value))
    return ""


app = typer.Typer(
    name="phalanx",
    cls=LazyCommandGroup,
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


def main() -> None:
    """Run the command line; a UserError becomes a message on stderr and exit code 2."""
    try:
        app()
    except UserError as error:
        print(f"phalanx: {error}", file=sys.stderr)
        sys.exit(2)
