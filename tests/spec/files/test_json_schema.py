import tomllib

import pytest

from phalanx.spec.files.json_schema import SCHEMA_FILE, run_schema, schema_text
from phalanx.spec.files.load import preset_names
from phalanx.spec.files.template import run_file_template


def test_published_json_schema_is_current():
    assert SCHEMA_FILE.read_text() == schema_text(), "write it again: python -m phalanx.spec.files.json_schema"


def test_run_schema_contains_run_tables_and_model_presets():
    schema = run_schema()
    assert {"model", "data", "training", "layout", "cluster"} <= set(schema["properties"])
    assert schema["definitions"]["ModelSpec"]["properties"]["preset"]["enum"] == preset_names("models")
    assert "required" not in schema["definitions"]["ModelSpec"]
    assert "null" not in schema_text()


def test_run_schema_accepts_template_and_rejects_invalid_values():
    jsonschema = pytest.importorskip("jsonschema")
    run = tomllib.loads(run_file_template("run.toml", "schema"))
    jsonschema.validate(run, run_schema())
    for table, key, value in (("training", "steps", "many"), ("training", "step", 1), ("model", "preset", "tony")):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**run, table: {key: value}}, run_schema())
