"""`phalanx init`: a commented run file as a start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from phalanx.spec.base import require
from phalanx.spec.errors import UserError
from phalanx.spec.files.json_schema import SCHEMA_FILE, schema_text
from phalanx.spec.files.load import load_model_spec
from phalanx.spec.files.recipes import Task, recipe
from phalanx.spec.files.template import run_file_template


def init(
    path: Annotated[Path, Argument(help="File to write.")] = Path("run.toml"),
    force: Annotated[bool, Option("--force", help="Overwrite an existing file.")] = False,
    task: Annotated[Task, Option(help="What the file is for.")] = "pretrain",
    model: Annotated[
        str | None, Option(help="With another task: the model to start from, a directory or its name on the hub.")
    ] = None,
    data: Annotated[str | None, Option(help="With another task: the file to train on.")] = None,
    schema: Annotated[bool, Option("--schema", help="Write run.schema.json, for editors, next to the file.")] = False,
) -> None:
    """Write a commented run file: the demo's model and data, and every other key with its default.

    With another task, the file is short, and its values are those of published runs, with their sources: continued
    pre-training, supervised fine-tuning on conversations (sft), low-rank adapters (lora), or preferences (dpo).

    Editors with Taplo (such as VS Code with Even Better TOML) complete and check its keys by the schema that its
    first line names: the installed one, or with --schema a copy that travels with the file.

    Examples:

        phalanx init

        phalanx init experiments/wide.toml --schema

        phalanx init tuning.toml --task sft --model Qwen/Qwen2.5-0.5B --data chats.jsonl
    """
    for option, value in (("--model", model), ("--data", data)):
        fix = "add --task continue, sft, lora or dpo"
        require(task != "pretrain" or value is None, option, value, "has no effect on a file for pre-training", fix)
    if path.exists() and not force:
        raise UserError("PATH", str(path), "exists already", fix="choose another name, or overwrite it with --force")
    schema_file = path.with_name(SCHEMA_FILE.name)
    if schema and not force and schema_file.exists() and schema_file.read_text(encoding="utf-8") != schema_text():
        fix = "overwrite it with --force, or remove --schema"
        raise UserError("--schema", str(schema_file), "exists already", fix=fix)
    try:
        if schema:
            schema_file.write_text(schema_text())
        location = f"./{SCHEMA_FILE.name}" if schema else SCHEMA_FILE.as_uri()
        if task == "pretrain":
            text = run_file_template(str(path), location)
        else:
            spec = None if model is None else load_model_spec(model)
            text = recipe(task, str(path), location, model, spec, data)
        path.write_text(text)
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
        raise UserError("PATH", str(path), problem, fix="choose another directory") from None
    print(f"wrote {path}; train it with: phalanx train {path}")
