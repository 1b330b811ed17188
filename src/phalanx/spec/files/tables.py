"""Tables of run files: parse TOML and JSON files, merge tables, set one field from its text."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

import pydantic_core

from phalanx.spec.components import mark_components
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import printable
from phalanx.spec.local_paths import check_local_path

Table = dict[str, Any]
RUN_FILE = "run.toml"
"""File in a run directory: the complete run, resolved."""
MARKER_FILE = "phalanx.json"
"""File in a run directory: Phalanx may write to this directory."""
MAX_DEPTH = 100
"""Maximum depth of nested tables and lists. No field of a run is deeper than a few."""


def read_toml(path: str | Path, file_kind: Literal["run file", "machine file"] = "run file") -> Table:
    """Parse a TOML file; raise UserError if the file does not exist or is not TOML."""
    path = Path(check_local_path(file_kind, str(path)))
    if not path.is_file():
        problem = "is a directory" if path.is_dir() else "is not a file" if path.exists() else "does not exist"
        name = path.name if path.suffix == ".toml" else "run.toml"
        command = f"phalanx init {name}" if file_kind == "run file" else f"phalanx calibrate RUN_DIR ... --out {path}"
        fix = f"use {path / 'run.toml'}" if (path / "run.toml").is_file() else f"create one with: {command}"
        raise UserError(file_kind, str(path), problem, fix)
    try:
        return parse_toml(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(file_kind, str(path), f"is not valid TOML: {error}", "correct the file") from None
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise UserError(file_kind, str(path), problem, "check the permissions of this file") from None


def read_run_table(path: str | Path, trust: bool | None) -> Table:
    """Parse a run file, and mark its components if they are not trusted.

    With `trust` None they are trusted as the file says, but not in a run directory, which may be someone else's. Raises
    UserError if the file does not exist or is not TOML.
    """
    table = read_toml(path)
    file = Path(path).absolute()
    if trust:
        mark_components(table, None)
    elif trust is False or is_in_run_directory(file) or is_in_run_directory(file.resolve()):
        mark_components(table, str(file))
    return table


def is_in_run_directory(file: Path) -> bool:
    """Return whether a file lies in a directory that a run has written: with its marker, or with a checkpoint."""
    folder = file.parent
    return (folder / MARKER_FILE).exists() or any(folder.glob("checkpoints/step-*"))


def parse_toml(text: str) -> Table:
    """Return the table of a TOML text.

    Raises tomllib.TOMLDecodeError if the text is not TOML; or values are nested deeper than `MAX_DEPTH`, an integer has
    more than 64 bits, or text contains control characters, which would reach terminals.
    """
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise _nesting_error() from None
    except ValueError as error:  # also for a number of thousands of digits
        raise tomllib.TOMLDecodeError(str(error)) from None
    _check_values(table, MAX_DEPTH)
    return table


def _check_values(value: Any, depth: int) -> None:
    """Raise TOMLDecodeError for values that are nested deeper, for control characters, and for too large integers."""
    if depth < 0:
        raise _nesting_error()
    if isinstance(value, int) and abs(value) >= 2**63:
        raise tomllib.TOMLDecodeError("an integer has more than 64 bits")
    if isinstance(value, str) and printable(value) != value:
        raise tomllib.TOMLDecodeError(f"the text '{printable(value)}' contains control characters")
    children = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        _check_values(child, depth - 1)


def _nesting_error() -> tomllib.TOMLDecodeError:
    return tomllib.TOMLDecodeError(f"tables or lists are nested more than {MAX_DEPTH} deep")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Unlike `json.loads`, it raises ValueError for every text that is not JSON: also for one that is nested too deep,
    or that contains half a surrogate pair, which cannot be printed.
    """
    return pydantic_core.from_json(text)


def read_json(path: Path, field: str = "model config", fix: str = "use a Hugging Face config.json") -> Table:
    """Parse a JSON file that contains a table.

    Raises UserError if the file cannot be read, or is not a table in JSON.
    """
    try:
        return dict(parse_json(path.read_bytes()))
    except OSError as error:
        raise UserError(field, str(path), f"cannot be read: {error.strerror}", fix) from None
    except (ValueError, TypeError) as error:
        raise UserError(field, str(path), f"is not valid JSON: {error}", fix) from None


def deep_merge(base: Table, override: Table) -> Table:
    """Return `base` with the values of `override`, merged table by table."""
    merged = dict(base)
    for key, value in override.items():
        base_value = merged.get(key)
        merged[key] = (
            deep_merge(base_value, value) if isinstance(base_value, dict) and isinstance(value, dict) else value
        )
    return merged


def set_path(table: Table, path: list[str], text: str, origin: str) -> None:
    """Set a field of a nested table from its text.

    An entry of a list has its number as key, from 0. The text is a TOML value, or a string without quotes; empty text
    removes the field. Errors name `origin`, the option or variable with the text.
    """
    parent: Any = table
    for depth, name in enumerate(path):
        key: Any = _entry_number(parent, path, depth, text, origin) if isinstance(parent, list) else name
        if depth < len(path) - 1:
            parent = parent[key] if isinstance(parent, list) else parent.setdefault(key, {})
            if not isinstance(parent, dict | list):
                raise UserError(origin, text, f"uses {name} as a table, which is a value", "correct the dotted path")
        elif text:
            parent[key] = parse_toml_value(text)
        elif isinstance(parent, list) or key in parent:
            del parent[key]


def _entry_number(entries: list[Any], path: list[str], depth: int, text: str, origin: str) -> int:
    """Return the number of an entry of a list, which `path[depth]` is."""
    if path[depth].isdecimal() and int(path[depth]) < len(entries):
        return int(path[depth])
    name = ".".join(path[:depth])
    problem = f"names {path[depth]!r} in {name}, which is a list of {len(entries)}"
    raise UserError(origin, text, problem, f"number its entries from 0, such as {name}.0" if entries else f"set {name}")


def parse_toml_value(text: str) -> Any:
    """Return a TOML value from its text.

    Text that is not TOML is a string, so that --set name=trial needs no quotes; 32e9 is also accepted as an integer.
    """
    try:
        value = parse_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    is_whole = isinstance(value, float) and value.is_integer() and "." not in text
    return int(value) if is_whole else value
