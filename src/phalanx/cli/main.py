"""The `phalanx` command: one file per subcommand, which parses, calls one package, and prints.

Why: `docs/design/decisions/lazy-commands.md`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, NoReturn

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup

from phalanx import __version__
from phalanx.cli.common.usage_errors import refuse_urls, translate_usage_errors
from phalanx.spec.errors import UserError, record_error
from phalanx.spec.formatting import printable

COMPLETION_VARIABLE = "_PHALANX_COMPLETE"
"""Variable by which a shell asks for completions (typer)."""
PANELS = {
    "Plan": {
        "plan": "Rank all layouts of a run on a cluster.",
        "advise": "Compare rules of thumb with the planner; fix OOM.",
        "memory": "Show predicted memory per rank and strategy.",
        "mesh": "Show process groups per axis.",
        "placement": "Map ranks to nodes and bytes to links.",
        "pipeline": "Show, check and split pipeline schedules.",
        "info": "Show parameters, FLOPs and state of a model.",
        "calibrate": "Fit the planner to runs on your machine.",
    },
    "Train": {
        "init": "Write a commented run file.",
        "train": "Train the model of a run file.",
        "launch": "Write job files for Slurm, Kubernetes, SkyPilot.",
        "watch": "Show a run while it trains.",
        "runs": "List runs: state, step, loss, speed.",
    },
    "Verify": {
        "dryrun": "Trace a training step and compare it with the plan.",
        "report": "Compare predicted with measured; find bottlenecks.",
        "bench": "Benchmark the machine at the shapes of a run.",
    },
    "Operate": {
        "doctor": "Check that machines are fit to train.",
        "debug": "Explain a hang or failure; test learning rates.",
    },
    "Data and models": {
        "data": "Tokenize text and inspect tokens.",
        "generate": "Sample text from a checkpoint.",
        "chat": "Talk to a checkpoint.",
        "evaluate": "Print held-out losses, or scores by tasks of lm-eval.",
        "export": "Write a checkpoint in the Hugging Face format.",
        "experts": "Show expert load; reorder experts over ranks.",
    },
    "Swarm": {
        "swarm": "Train one model at several sites over slow links.",
    },
}
"""Commands by panel, with one line each. A command is a file in `commands/` with a function of its name or an `app`."""
COMMANDS = [name for commands in PANELS.values() for name in commands]


class LazyCommandGroup(TyperGroup):
    """Command group that imports a command's file on demand, so that a command starts without the others."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return COMMANDS

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option --help with a default that typer need not convert."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False  # for None, typer would import pydantic to convert it to a bool
        return option

    listing = False
    """True while commands are requested only for their one-line summaries."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help with one-line summaries."""
        self.listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self.listing = False

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the commands and options that begin with a word."""
        self.listing = True
        try:
            return super().shell_complete(ctx, incomplete)
        finally:
            self.listing = False

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Parse the arguments, with usage errors as UserError."""
        _, words, *_ = args
        refuse_urls(words, lambda option: option in self._list_flags(words[0]))
        with translate_usage_errors():
            return super().make_context(*args, **extra)

    def _list_flags(self, name: str) -> set[str]:
        """Return the options of a command and its subcommands that take no value."""
        command = self.get_command(None, name) if name in COMMANDS else None
        commands = [command, *getattr(command, "commands", {}).values()]
        parameters = [parameter for member in commands for parameter in getattr(member, "params", ())]
        return {option for parameter in parameters if getattr(parameter, "is_flag", False) for option in parameter.opts}

    def invoke(self, ctx: Any) -> Any:
        """Run the command, with usage errors as UserError."""
        with translate_usage_errors():
            return super().invoke(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, imported from its file unless only its summary is listed."""
        if cmd_name not in COMMANDS:
            from phalanx.spec.base import did_you_mean  # imports pydantic, which the help of a command does not need

            raise UserError("command", cmd_name, "is not known", fix=did_you_mean(cmd_name, COMMANDS))
        if self.listing:
            panel = next(panel for panel, commands in PANELS.items() if cmd_name in commands)
            return TyperCommand(cmd_name, help=PANELS[panel][cmd_name], rich_help_panel=panel)
        module = import_module(f"phalanx.cli.commands.{cmd_name}")
        typer_app = getattr(module, "app", None)
        if typer_app is None:
            typer_app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
            typer_app.command(cmd_name)(getattr(module, cmd_name))
        command = typer.main.get_command(typer_app)
        command.name = cmd_name
        if cmd_name != "train":  # whose only rank may be this process, and prints what the user's code prints
            _escape_output_of(command)
        return command


def _escape_output_of(command: Any) -> None:
    """Let a command and its subcommands write control characters as escapes: text of files may contain any."""
    for subcommand in getattr(command, "commands", {}).values():
        _escape_output_of(subcommand)
    if command.callback is not None:
        command.callback = _with_printable_output(command.callback)


def _with_printable_output(callback: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(callback)
    def run(*args: Any, **options: Any) -> Any:
        from phalanx.spec.terminal import printable_output

        with printable_output():
            return callback(*args, **options)

    return run


app = typer.Typer(
    name="phalanx",
    cls=LazyCommandGroup,
    help="Plans, runs and verifies distributed training of language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"phalanx {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    from phalanx.spec.log import log_to_stderr

    log_to_stderr()


def main() -> None:
    """Run the command line; print a UserError to stderr and exit with 2."""
    try:
        app()
    except UserError as error:
        _exit_with_error(error)
    except PermissionError as error:
        if error.filename is None:  # no file name: the error is about a process or a socket
            raise
        fix = "check its permissions, or choose another file"
        _exit_with_error(UserError("file", str(error.filename), "cannot be accessed: permission denied", fix=fix))
    except ModuleNotFoundError as error:
        from phalanx.spec.extras import EXTRA_OF_PACKAGE, missing_package

        if error.name not in EXTRA_OF_PACKAGE:
            raise
        _exit_with_error(missing_package("this command", None, error.name))


def _exit_with_error(error: UserError) -> NoReturn:
    if COMPLETION_VARIABLE in os.environ:  # a shell completes a command line that is not finished
        sys.exit(1)
    record_error(error)
    print(printable(f"phalanx: {error}"), file=sys.stderr)
    sys.exit(2)
