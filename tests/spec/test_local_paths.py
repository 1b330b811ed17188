"""No field of a run file accepts a URL instead of a local path."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from phalanx.spec.base import Spec
from phalanx.spec.components import ComponentSpec
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_machine, load_model_spec, load_run, run_from_table
from phalanx.spec.local_paths import check_local_path
from phalanx.spec.run import RunSpec

URL = "s3://bucket/path"
FREE_TEXTS = {
    "data.text_key",
    "evaluation.prompt",
    "metrics.wandb",
    "model.kinds.name",
    "model.layers",
    "metrics.wandb_entity",
    "metrics.wandb_group",
    "metrics.wandb_tags",
    "cluster.calibration.identified_constants",
}
"""Text fields that name no file: of a record, of a project, or for a model to continue."""


def _text_fields(spec_class: type[Spec], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path of every field that may contain free text, and a value for it."""
    for name, field in spec_class.model_fields.items():
        types = _inner_types(field.annotation)
        for spec in (type_ for type_ in types if isinstance(type_, type) and issubclass(type_, Spec)):
            if spec is not ComponentSpec:
                yield from _text_fields(spec, f"{path}{name}.")
        if str in types:
            yield f"{path}{name}", [URL] if any(type_ in types for type_ in (list, tuple)) else URL


def _inner_types(annotation: Any) -> list[Any]:
    """Return a type, and the types that it is made of."""
    origin = getattr(annotation, "__origin__", None)
    return [annotation, origin, *(inner for type_ in get_args(annotation) for inner in _inner_types(type_))]


TEXT_FIELDS = dict(_text_fields(RunSpec))


def test_text_fields_include_fields_of_nested_tables() -> None:
    assert {"output_dir", "data.train", "layout.schedule_file", "model.from_hf", *FREE_TEXTS} <= set(TEXT_FIELDS)


@pytest.mark.parametrize("field", [field for field in TEXT_FIELDS if field not in FREE_TEXTS])
def test_url_is_refused_in_every_field_that_may_name_a_file(field: str) -> None:
    value: Any = TEXT_FIELDS[field]
    for key in reversed(field.split(".")):
        value = {key: value}
    with pytest.raises(UserError, match=rf"(?m)^{re.escape(field)}(\[0\])? = '{URL}' "):
        run_from_table(value)


def test_url_error_names_the_source_and_what_is_supported() -> None:
    with pytest.raises(UserError) as error_info:
        run_from_table({"data": {"train": ["stdlib", "https://host/text.jsonl"]}})
    assert str(error_info.value) == (
        "data.train[1] = 'https://host/text.jsonl' is a URL, but only local paths and hf:NAME are supported\n"
        "  fix: mount or copy the files, and use their local path"
    )


@pytest.mark.parametrize("source", ["hf:org/name", "hf:/data/saved", "stdlib", "a/b*.txt", "C:/text", "x:y", "a//b"])
def test_names_of_datasets_and_local_paths_are_sources(source: str) -> None:
    assert run_from_table({"data": {"train": source}}).data.train == [source]


@pytest.mark.parametrize("source", ["hf://org/name", "hf:s3://bucket/name", "HTTPS://host/name", "gs://b", "file:///x"])
def test_urls_are_no_sources(source: str) -> None:
    with pytest.raises(UserError, match="is a URL"):
        run_from_table({"data": {"train": source}})


def test_file_url_is_replaced_by_its_path_in_the_fix() -> None:
    with pytest.raises(UserError, match="fix: write '/data/runs'"):
        check_local_path("output_dir", "file:///data/runs")


@pytest.mark.parametrize(
    "read", [load_run, load_model_spec, load_machine, lambda url: load_run("run.toml", machine=url)]
)
@pytest.mark.parametrize("suffix", [".toml", ".json", ""])
def test_functions_that_read_a_file_refuse_its_url(read: Any, suffix: str, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(UserError) as error_info:
        read(f"{URL}{suffix}")
    assert URL in str(error_info.value)
