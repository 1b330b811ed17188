"""`phalanx init`: a commented run file as a start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from phalanx.spec.errors import UserError
from phalanx.spec.files.json_schema import SCHEMA_FILE, schema_text
from phalanx.spec.files.template import run_file_template


def init(
    path: Annotated[Path, Argument(help="File to write.")] = Path("run.toml"),
    force: Annotated[bool, Option("--force", help="Overwrite an existing file.")] = False,
    schema: Annotated[bool, Option("--schema", help="Write run.schema.json, for editors, next to the file.")] = False,
) -> None:
    """Write a commented run file: the demo's model and data, and every other key with its default.

    Editors with Taplo (such as VS Code with Even Better TOML) complete and check its keys by the schema that its
    first line names: the installed one, or with --schema a copy that travels with the file.

    Examples:

        phalanx init

        phalanx init experiments/wide.toml --schema
    """
    if path.exists() and not force:
        raise UserError("PATH", str(path), "exists already", fix="choose another name, or overwrite it with --force")
    schema_file = path.with_name(SCHEMA_FILE.name)
    if schema and not force and schema_file.exists() and schema_file.read_text(encoding="utf-8") != schema_text():
        fix = "overwrite it with --force, or remove --schema"
        raise UserError("--schema", str(schema_file), "exists already", fix=fix)
    try:
        if schema:
            schema_file.write_text(schema_text())
        path.write_text(run_file_template(str(path), f"./{SCHEMA_FILE.name}" if schema else SCHEMA_FILE.as_uri()))
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
        raise UserError("PATH", str(path), problem, fix="choose another directory") from None
    print(f"wrote {path}; train it with: phalanx train {path}")
