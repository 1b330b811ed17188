"""Commands whose first argument may be a part of what they do: `phalanx advise [oom] RUN.toml`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from phalanx.spec.errors import UserError


def command_with_part(part: str) -> type[TyperCommand]:
    """Return a kind of command whose usage line shows an optional part."""

    class OptionalPart(TyperCommand):
        def collect_usage_pieces(self, ctx: Any) -> list[str]:
            return [f"[{part}]", "RUN.toml", "[OPTIONS]"]

    return OptionalPart


def split_part(
    command: str, first: str, second: str | None, parts: Collection[str], label: str, fix: str
) -> tuple[str | None, Path]:
    """Return the requested part, or None, and the run file.

    A single argument is a file, whatever its name, if that file exists.
    """
    if second is not None and first not in parts:
        raise UserError(command, f"{first} {second}", f"is not [{label}] RUN.toml", fix=fix)
    if second is None and first in parts and not Path(first).exists():
        raise UserError(command, first, "requires a run file", fix=fix)
    return (None, Path(first)) if second is None else (first, Path(second))
