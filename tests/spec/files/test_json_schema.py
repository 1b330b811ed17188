import tomllib

import pytest

from phalanx.spec.files.json_schema import PUBLISHED, run_schema, schema_text
from phalanx.spec.files.load import preset_names
from phalanx.spec.files.template import run_file_template


def test_the_published_schema_is_current():
    assert PUBLISHED.read_text() == schema_text(), "write it anew: python -m phalanx.spec.files.json_schema"


def test_it_knows_every_table_and_the_presets():
    schema = run_schema()
    assert {"model", "data", "training", "layout", "cluster"} <= set(schema["properties"])
    assert schema["definitions"]["ModelSpec"]["properties"]["preset"]["enum"] == preset_names("models")
    assert "required" not in schema["definitions"]["ModelSpec"]
    assert "null" not in schema_text()


def test_it_accepts_the_starter_and_refuses_a_wrong_value():
    jsonschema = pytest.importorskip("jsonschema")
    run = tomllib.loads(run_file_template("run.toml", "schema"))
    jsonschema.validate(run, run_schema())
    for table, key, value in (("training", "steps", "many"), ("training", "step", 1), ("model", "preset", "tony")):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**run, table: {key: value}}, run_schema())
