"""Conversion of typer's command-line errors to our errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from phalanx.spec.errors import UserError
from phalanx.spec.formatting import number_fix
from phalanx.spec.local_paths import URL, check_local_path, check_store, check_text_source

UsageError: Any = typer.BadParameter.__base__
"""Base class of usage errors in click, or in the click that newer typer versions include."""
FREE_TEXT_OPTIONS = ("--prompt", "--image")
"""Options whose values may be URLs: a prompt, and the image of a container."""
ADDRESS_OPTIONS = ("--listen", "--rendezvous")
TEXT_COMMANDS = (("data", "prepare"), ("data", "tokenizer"), ("data", "inspect"))
"""Commands whose arguments are text, which may be in an object store."""
ADDRESS_COMMANDS = (("swarm", "join"), ("swarm", "status"), ("swarm", "text"))
"""Commands whose argument is an address."""


def refuse_urls(arguments: Sequence[str], is_flag: Callable[[str], bool]) -> None:
    """Raise UserError for a URL in a command line: a file needs a local path, and an address has no scheme.

    This runs before options are parsed: a parsed path has lost the second slash of its scheme. `is_flag` returns
    whether an option takes no value, so that an argument may follow it.
    """
    for previous, argument in zip(("", *arguments), arguments, strict=False):
        option, _, value = argument.partition("=")
        if not URL.match(value if option.startswith("--") else argument):
            continue
        if not option.startswith("--"):
            value = argument
            option = "argument" if not previous.startswith("-") or is_flag(previous) else previous
        if option in ADDRESS_OPTIONS or (option == "argument" and tuple(arguments[:2]) in ADDRESS_COMMANDS):
            problem = "is a URL, but an address has no scheme"
            raise UserError(option, value, problem, fix="write host:port, such as 203.0.113.7:7077")
        if option == "argument" and tuple(arguments[:2]) in TEXT_COMMANDS:
            check_text_source("SOURCE", value)
        elif option == "--upload":
            check_store(option, value)
        elif option not in FREE_TEXT_OPTIONS:
            check_local_path(option, value)


@contextmanager
def translate_usage_errors() -> Iterator[None]:
    """Raise UserError for typer's errors: an unknown option, a missing argument, a value of another type."""
    try:
        yield
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a help page, not an error
            raise
        raise to_user_error(error) from None


def to_user_error(error: Any) -> UserError:
    """Convert a usage error to a UserError: option or argument, value, problem and fix."""
    command = error.ctx.command_path if error.ctx else "phalanx"
    hint = f"see `{command} --help`" if error.ctx else "see --help"
    if hasattr(error, "possibilities") and hasattr(error, "option_name"):
        if moved := getattr(error.ctx.command, "moved_options", {}).get(error.option_name):
            return UserError("option", error.option_name, "has moved to another command", fix=f"write: {moved}")
        names = [name for parameter in error.ctx.command.params for name in parameter.opts if name.startswith("-")]
        if "--set" in names and (field := _find_run_field(error.option_name)):
            return UserError("option", error.option_name, "is not known", fix=f"write --set {field}=VALUE")
        return _unknown_name_error("option", error.option_name, names)
    if hasattr(error, "option_name"):
        problem = _describe_problem(error.message, f"Option {error.option_name!r}")
        return UserError(error.option_name, None, problem, fix=hint)
    parameter = getattr(error, "param", None)
    if parameter is not None:
        # The name as in help: --nodes, RUN.toml
        if parameter.param_type_name == "option":
            name = str(max(parameter.opts, key=len))
        else:
            name = re.sub(r"^\[(.*)\]$", r"\1", parameter.metavar or parameter.name)
        if type(error).__name__ == "MissingParameter":
            usage = error.ctx.get_usage().partition(" ")[2].strip()
            option = f" {name} {parameter.metavar or ''}".rstrip() if name.startswith("-") else ""
            return UserError(name, None, "is missing", fix=f"write: {usage}{option}")
        # typer provides the value, or the message contains it.
        value = error.__cause__.errors()[0]["input"] if hasattr(error.__cause__, "errors") else None
        _, is_choice, choices = error.message.partition(" is not one of ")
        if is_choice:
            return _unknown_name_error(name, str(value), re.findall(r"'([^']*)'", choices))
        return UserError(name, value, _describe_problem(error.message), fix=number_fix(name, value) or hint)
    requested = error.message.partition("'")[2].partition("'")[0]
    commands = getattr(error.ctx.command, "commands", None)
    if commands and requested:
        return _unknown_name_error("command", requested, list(commands))
    if commands:
        hint = f"write a command first, such as `{command} {next(iter(commands))}`; {hint}"
    return UserError(command, None, _describe_problem(error.message), fix=hint)


def _unknown_name_error(kind: str, requested: str, known_names: list[str]) -> UserError:
    from phalanx.spec.base import did_you_mean  # imports pydantic, which the help of a command does not need

    return UserError(kind, requested, "is not known", fix=did_you_mean(requested, known_names))


def _find_run_field(option: str) -> str:
    """Return the field of a run file with the name of an option, such as training.steps for --steps; else ""."""
    from phalanx.spec.run import RunSpec  # imports pydantic, which the help of a command does not need

    name = option.lstrip("-").replace("-", "_")
    tables = RunSpec.model_fields.items()
    fields = [f"{table}.{name}" for table, field in tables if name in getattr(field.annotation, "model_fields", ())]
    return fields[0] if len(fields) == 1 else ""


def _describe_problem(message: str, subject: str = "") -> str:
    """Return a message without subject and capital, in the terms of errors in run files."""
    text = message.removeprefix(subject).strip().rstrip(".").partition(", unable to parse")[0]
    text = text[0].lower() + text[1:]
    return (
        text.replace("missing command", "requires a command")
        .replace("input should be", "must be")
        .replace("a valid integer", "a whole number")
    )
