"""Write the generated pages of docs/reference: commands, the run file, and the rules of `phalanx doctor`.

    python tools/reference_pages.py

A test (tests/docs/test_reference.py) compares the pages with what this writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from phalanx.cli.main import PANELS, app
from phalanx.doctor.rules import SECTIONS
from phalanx.spec.files import json_schema

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
COMPLETION = ("--install-completion", "--show-completion")
SCHEMA = Path(json_schema.__file__).with_name("run.schema.json")
CLI_INTRODUCTION = """# Commands

`phalanx COMMAND --help` prints the same. This page is written by `python tools/reference_pages.py`.
"""
CONFIG_INTRODUCTION = """# Run file

The fields of a run file, table by table. `phalanx init run.toml` writes a commented file with all of them. The page is
written from the JSON schema by `python tools/reference_pages.py`.

Values come from the defaults, the file, the environment (`PHALANX_TRAINING__STEPS=200`) and `--set training.steps=200`.
A later source replaces an earlier one. `--set KEY=` restores the default.
"""
DOCTOR_INTRODUCTION = """# Rules of `phalanx doctor`

Every check, its threshold, its source and its remedy. The [guide](../guides/doctor.md) explains how to run the checks.
The rules are rows of `src/phalanx/doctor/rules.toml`, from which `python tools/reference_pages.py` writes this page.

Sources: AZNHC (Azure), OCI, GCM (Meta), Imbue, Primus (AMD), NVRx (NVIDIA resiliency extension) and DCGM are published
health checks of clusters. "ours" is an estimate of this project.

"""


def cli_page() -> str:
    """Return the page of commands, by panel."""
    group = typer.main.get_command(app)
    lines = [CLI_INTRODUCTION]
    for panel, commands in PANELS.items():
        lines += [f"## {panel}", "", "| command | |", "|---|---|"]
        lines += [f"| [`phalanx {name}`](#phalanx-{name}) | {summary} |" for name, summary in commands.items()]
        lines.append("")
    for name in (name for commands in PANELS.values() for name in commands):
        lines += _command_section(f"phalanx {name}", group.get_command(None, name), level=2)
    return "\n".join(lines).rstrip() + "\n"


def _command_section(title: str, command: Any, level: int) -> Iterator[str]:
    yield from (f"{'#' * level} {title}", "")
    yield from (_markdown_help(command.help or ""), "")
    parameters = [each for each in command.params if not each.hidden and not set(each.opts) & set(COMPLETION)]
    if parameters:
        yield from ("| option | default | |", "|---|---|---|", *map(_parameter_row, parameters), "")
    for name, subcommand in getattr(command, "commands", {}).items():
        yield from _command_section(f"{title} {name}", subcommand, level + 1)


def _markdown_help(text: str) -> str:
    """Return help with its indented examples as code blocks."""
    paragraphs = [part.strip("\n") for part in re.split(r"\n\s*\n", text)]
    blocks: list[str] = []
    for paragraph in paragraphs:
        is_code = paragraph.startswith("    ")
        if is_code and blocks and blocks[-1].endswith("\n```"):
            blocks[-1] = f"{blocks[-1].removesuffix('```')}{paragraph.strip()}\n```"
        else:
            blocks.append(f"```text\n{paragraph.strip()}\n```" if is_code else _escape(paragraph))
    return "\n\n".join(blocks)


def _parameter_row(parameter: Any) -> str:
    is_option = parameter.opts[0].startswith("-")
    names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    metavar = f" `{parameter.metavar}`" if parameter.metavar else ""
    shown = f"{names}{metavar}" if is_option else metavar.strip() or f"`{parameter.name.upper()}`"
    has_default = parameter.default not in (None, False, (), []) and not callable(parameter.default)
    default = "required" if parameter.required else f"`{parameter.default}`" if has_default else ""
    return _row(shown, default, _escape(parameter.help or ""))


def config_page() -> str:
    """Return the page of the run file's fields, by table."""
    schema = json.loads(SCHEMA.read_text())
    lines = [CONFIG_INTRODUCTION, *_table_section("", schema, schema["definitions"])]
    return "\n".join(lines).rstrip() + "\n"


def _table_section(path: str, table: dict[str, Any], definitions: dict[str, Any], of_kind: str = "") -> Iterator[str]:
    title = f"## `[{path}]`{of_kind}" if path else "## Top level"
    yield from (title, "", _escape(table.get("description", "")), "")
    yield from ("| field | values | default | |", "|---|---|---|---|")
    subtables = []
    for name, field in table["properties"].items():
        options = (field, *field.get("anyOf", ()), *field.get("oneOf", ()), field.get("items", {}))
        references = [each["$ref"].rsplit("/", 1)[1] for each in options if "$ref" in each]
        definition = definitions[references[0]] if references else field
        # A list of tables has no sections of its own for the tables in it.
        if "properties" in definition and not path.startswith("["):
            subpath = f"{path}.{name}".lstrip(".")
            subpath = f"[{subpath}]" if "items" in field else subpath
            tables = [definitions[reference] for reference in references]
            # Tables of several kinds have a field that says which.
            kinds = [f", kind `{table['properties']['kind']['const']}`" if len(tables) > 1 else "" for table in tables]
            subtables += [(subpath, table, kind) for table, kind in zip(tables, kinds, strict=True)]
            continue
        default = f"`{json.dumps(field['default'])}`" if field.get("default") is not None else ""
        yield _row(f"`{name}`", _values(field | definition), default, _escape(field.get("description", "")))
    yield ""
    for subpath, subtable, of_kind in subtables:
        yield from _table_section(subpath, subtable, definitions, of_kind)


def _values(field: dict[str, Any]) -> str:
    """Return the values that a field of the schema may have."""
    options = [each for each in field.get("anyOf", [field]) if each.get("type") != "null"]
    limits = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    words = []
    for option in options:
        values = option.get("enum") or ([option["const"]] if "const" in option else [])
        bounds = [f"{sign} {option[key]}" for key, sign in limits.items() if key in option]
        shown = [value if isinstance(value, str) else json.dumps(value) for value in values]
        kind = str(option.get("type", "table"))
        words.append(", ".join(f"`{value}`" for value in shown) or " ".join([kind, *bounds]))
    return " or ".join(dict.fromkeys(words))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _escape(text: str) -> str:
    """Return text on one line whose brackets and angle brackets do not read as links or HTML."""
    parts = " ".join(text.split()).split("`")
    parts[::2] = [re.sub(r"([\[\]<*_])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def doctor_page() -> str:
    """Return the page of the doctor's rules."""
    lines = []
    for section in SECTIONS.values():
        header = ("| id | | measured | expected | source | remedy |", "|---|---|---|---|---|---|")
        lines += [f"## {section.title}", "", *header]
        for rule in section.rules:
            threshold = f"{rule.threshold} {rule.unit}".strip()
            cells = (f"`{rule.id}`", rule.severity, rule.quantity, threshold, rule.source, rule.remedy)
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        lines.append("")
    return DOCTOR_INTRODUCTION + "\n".join(lines).rstrip() + "\n"


PAGES = {"cli.md": cli_page, "config.md": config_page, "doctor-rules.md": doctor_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page())
