"""Commented run file of `phalanx init`, generated from the fields, docs and defaults of RunSpec."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from phalanx.spec.base import Spec
from phalanx.spec.components import ComponentSpec
from phalanx.spec.files.load import run_from_table
from phalanx.spec.run import RunSpec

UNCOMMENTED_FIELDS = {
    "name",
    "model.preset",
    "data.train",
    "training.steps",
    "training.seq_len",
    "training.tokens_per_step",
    "training.precision",
    "optimizer.name",
    "layout.data_parallel",
    "evaluation.tokens",
}
"""Fields that the file sets to their defaults. All others are comments."""
CALIBRATION_TABLE = "cluster.calibration"
"""Table that only `phalanx calibrate` writes. The template omits it."""
DEFAULT_MODEL = "tiny"
TEMPLATE_VALUES = {"training.precision": "auto", "evaluation.tokens": 65536}
"""Values that the file sets other than the default. On many CPUs bf16 is slow, and so is an evaluation of all text."""
LINE_WIDTH = 100
COMMENT_COLUMN = 36
"""Column at which comments start."""

HEADER = """\
#:schema {schema}
#
# A run file of Phalanx. Train:       phalanx train {path}
# Train on two ranks:                 phalanx train {path} --nproc 2
# Train with a changed value:         phalanx train {path} --set training.steps=200
#
# Remove the # before a key to set it. The value shown is the default (under [model], the value of
# the preset), or an example if there is no default.
"""


def run_file_template(path: str, schema: str) -> str:
    """Return a run file with the defaults, named by `path`; `schema` is the location of the JSON schema."""
    run = run_from_table({"model": {"preset": DEFAULT_MODEL}})
    return "\n".join([HEADER.format(path=path, schema=schema), *_render_table(RunSpec, run, "")]) + "\n"


def _render_table(spec_class: type[Spec], table: Spec | None, path: str) -> Iterator[str]:
    """Yield the lines of a table, followed by those of its inner tables; with their defaults if the table is absent."""
    inner_tables: list[tuple[str, Spec | type[Spec], str]] = []
    for name, field in spec_class.model_fields.items():
        key = f"{path}{name}"
        value = field.get_default() if table is None else getattr(table, name)
        if key == CALIBRATION_TABLE or field.exclude:
            continue
        if isinstance(field.get_default(), dict):
            # A table of free keys is a comment, with the field's first example.
            yield from ("", *_render_comment(_describe_field(field)), f"# [{key}]")
            yield from (f"# {example} = {json.dumps(value)}" for example, value in (field.examples or [{}])[0].items())
        elif (inner := _find_inner_table(field, value)) is not None:
            header = f"[[{key}]]" if get_origin(field.annotation) is list else f"[{key}]"
            inner_tables.append((key, inner, header))
        else:
            yield from _render_field(key, field, value)
    for key, inner, header in inner_tables:
        inner_class = inner if isinstance(inner, type) else type(inner)
        # The header alone would already enable an absent table, so it is a comment too.
        present = None if table is None or isinstance(inner, type) else inner
        yield from ("", *_render_comment((inner_class.__doc__ or "").partition("\n\n")[0]))
        yield f"# {header}" if present is None else header
        yield from _render_table(inner_class, present, f"{key}.")


def _render_field(path: str, field: FieldInfo, value: Any) -> Iterator[str]:
    """Yield `key = value  # doc` with the doc wrapped in its own column, as a comment unless essential."""
    if not isinstance(value, bool | int | float | str | list | tuple):
        value = (field.examples or [None])[0]
    value = TEMPLATE_VALUES.get(path, value)
    setting = f"{path.rpartition('.')[2]} = {_format_value(value)}"
    setting = setting if path in UNCOMMENTED_FIELDS else f"# {setting}"
    if len(setting) > COMMENT_COLUMN - 2:
        yield from (*_render_comment(_describe_field(field)), setting)
        return
    first_line, *more_lines = textwrap.wrap(_describe_field(field), LINE_WIDTH - COMMENT_COLUMN - 2) or [""]
    yield f"{setting:{COMMENT_COLUMN}}# {first_line}" if first_line else setting
    yield from (f"{'':{COMMENT_COLUMN}}# {line}" for line in more_lines)


def _format_value(value: Any) -> str:
    """Return a value in TOML, tables in one line."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_format_value(inner)}' for key, inner in value.items())} }}"
    return json.dumps(value)


def _describe_field(field: FieldInfo) -> str:
    choices = " | ".join(get_args(field.annotation)) if get_origin(field.annotation) is Literal else ""
    return ". ".join(part for part in (choices, field.description) if part)


def _render_comment(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), LINE_WIDTH, initial_indent="# ", subsequent_indent="# ")


def _find_inner_table(field: FieldInfo, value: Any) -> Spec | type[Spec] | None:
    """Return the inner table of a field, present or possible; None for lists and components, which have short forms."""
    if isinstance(value, Spec):
        return value
    if get_origin(field.annotation) is tuple:
        return None
    spec_classes = [
        spec_class
        for spec_class in get_args(field.annotation)
        if isinstance(spec_class, type) and issubclass(spec_class, Spec) and spec_class is not ComponentSpec
    ]
    return spec_classes[0] if spec_classes else None
