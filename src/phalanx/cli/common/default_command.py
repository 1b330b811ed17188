"""Command that also has subcommands: `phalanx plan run.toml` and `phalanx plan explain run.toml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from typer.core import TyperGroup

from phalanx.cli.common.usage_errors import UsageError


class GroupWithDefault(TyperGroup):
    """Group whose callback is the command that runs if the first word names no subcommand.

    Options of the callback are not options of subcommands.
    """

    allow_extra_args = False
    allow_interspersed_args = True
    moved_options: ClassVar[dict[str, str]] = {}
    """Command line that replaces each former option of the callback, for the error."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the arguments of the subcommand or of the callback.

        A file with the name of a subcommand is an argument of the callback if the subcommand lacks its first argument.
        """
        subcommand = self.commands.get(args[0]) if args else None
        if subcommand is not None:
            try:
                return subcommand.make_context(f"{info_name} {args[0]}", args[1:], parent=parent, **extra)
            except UsageError as error:
                lacks_argument = type(error).__name__ == "MissingParameter" and error.param is subcommand.params[0]
                if not (lacks_argument and Path(args[0]).is_file()):
                    raise
        return super().make_context(info_name, args, parent=parent, **extra)
