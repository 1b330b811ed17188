"""JSON schema of a run file, with which editors (Taplo, Even Better TOML) complete and validate it.

`python -m phalanx.spec.files.json_schema` regenerates run.schema.json after a change of the descriptions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from phalanx.spec.files.load import preset_names
from phalanx.spec.run import RunSpec

SCHEMA_FILE = Path(__file__).with_name("run.schema.json")
Schema = dict[str, Any]


def run_schema() -> Schema:
    """Return the schema of RunSpec in TOML, with the names of the presets."""
    schema = RunSpec.model_json_schema(ref_template="#/definitions/{model}")
    definitions = schema.pop("$defs")
    for spec_name, folder in (("ModelSpec", "models"), ("ClusterSpec", "machines")):
        definitions[spec_name]["properties"]["preset"]["enum"] = preset_names(folder)
    definitions["TrainingSpec"]["properties"]["precision"]["enum"].append("auto")
    definitions["Layout"]["properties"]["activation_checkpointing"]["enum"].append("auto")
    component = definitions.pop("ComponentSpec")
    tables = {name: _simplify_table_schema(table) for name, table in definitions.items()}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **_simplify_table_schema(schema),
        "definitions": {**tables, "ComponentSpec": {"anyOf": [{"type": "string"}, component]}},
    }


def schema_text() -> str:
    """Return the schema as the text of its file."""
    return json.dumps(run_schema(), indent=2) + "\n"


def _simplify_table_schema(table: Schema) -> Schema:
    """Return the schema of a table with every key optional, because a preset may define it."""
    table = {key: value for key, value in table.items() if key not in ("required", "title")}
    if "description" in table:  # the example in a docstring is Python
        table["description"] = table["description"].partition("\n\nExample:")[0]
    return {**table, "properties": {name: _simplify_field_schema(field) for name, field in table["properties"].items()}}


def _simplify_field_schema(field: Schema) -> Schema:
    """Return the schema of a field without redundant title, table default or null, which TOML lacks."""
    keeps_default = isinstance(field.get("default", {}), bool | int | float | str | list)
    field = {key: value for key, value in field.items() if key != "title" and (key != "default" or keeps_default)}
    options = [option for option in field.pop("anyOf", []) if option != {"type": "null"}]
    if len(options) > 1:
        return {"anyOf": options, **field}
    return {**options[0], **field} if options else field


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text())
