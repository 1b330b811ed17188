"""Only fields of a run file whose files may be in an object store accept a URL, and no URL with credentials."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from phalanx.spec.base import Spec
from phalanx.spec.components import ComponentSpec
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_machine, load_model_spec, load_run, run_from_table
from phalanx.spec.files.write import with_absolute_paths
from phalanx.spec.local_paths import check_local_path
from phalanx.spec.run import RunSpec

URL = "s3://bucket/path"
FREE_TEXTS = {
    "training.freeze",
    "adapter.targets",
    "adapter.train",
    "data.text_key",
    "data.source.name",
    "data.source.text_key",
    "data.source.config",
    "data.source.split",
    "evaluation.prompt",
    "metrics.wandb",
    "model.kinds.name",
    "phase.weights",
    "data.held_out_sets",
    "model.layers",
    "metrics.wandb_entity",
    "metrics.wandb_group",
    "metrics.wandb_tags",
    "cluster.calibration.identified_constants",
}
"""Text fields that name no file: of a record, of a project, of a source, or for a model to continue."""


def _text_fields(spec_class: type[Spec], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path of every field that may contain free text, and a value for it."""
    for name, field in spec_class.model_fields.items():
        if field.exclude:
            continue
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


URL_FIELDS = {"data.train", "data.held_out", "data.source.path", "checkpoint.directory"}
"""Fields whose files may be in an object store."""
TEXT_FIELDS = dict(_text_fields(RunSpec))


def test_text_fields_include_fields_of_nested_tables() -> None:
    assert {"output_dir", "data.train", "layout.schedule_file", "model.from_hf", *FREE_TEXTS} <= set(TEXT_FIELDS)


@pytest.mark.parametrize("field", [field for field in TEXT_FIELDS if field not in {*FREE_TEXTS, *URL_FIELDS}])
def test_url_is_refused_in_every_field_that_may_name_a_file(field: str) -> None:
    value: Any = TEXT_FIELDS[field]
    for key in reversed(field.split(".")):
        value = {key: [value] if key == "source" else value}
    name = field.replace("data.source", "data.source[0]")
    with pytest.raises(UserError, match=rf"(?m)^{re.escape(name)}(\[0\])? = '{URL}' "):
        run_from_table(value)


def test_url_is_accepted_in_fields_of_data_and_checkpoints() -> None:
    source = {"name": "code", "path": [URL], "weight": 1.0}
    run = run_from_table({"data": {"source": [source], "held_out": URL}, "checkpoint": {"directory": f"{URL}/"}})
    assert (run.data.source[0].path, run.data.held_out, run.checkpoint.directory) == ([URL], [URL], URL)
    assert with_absolute_paths(run).data == run.data.replace(cache=str(Path(run.data.cache).expanduser()))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("s4://bucket/path", "has an unknown scheme.*did you mean s3://"),
        ("swift://host/path", "has an unknown scheme.*copy the files"),
        ("HTTPS://host/name", "has an unknown scheme.*did you mean https://"),
        ("s3:///path", "names no bucket or host"),
        ("file:///x", "is a URL.*write '/x'"),
        ("hf:s3://bucket/name", "is a URL"),
    ],
)
def test_url_that_cannot_be_read_is_refused(source: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"(?s)data.train\[0\] = '{source}' {message}"):
        run_from_table({"data": {"train": source}})


@pytest.mark.parametrize(
    "url",
    [
        "https://user:secret@host/text.jsonl",
        "https://host/text.jsonl?X-Amz-Signature=secret",
        "s3://bucket/text.jsonl?X-Amz-Signature=secret",
        "s3://key:secret@bucket/text.jsonl",
    ],
)
def test_url_with_credentials_is_refused_without_repeating_them(url: str) -> None:
    with pytest.raises(UserError, match="has a user name, a password or a query") as error_info:
        run_from_table({"data": {"train": url}})
    assert "secret" not in f"{error_info.value}{error_info.value.to_record()}"


@pytest.mark.parametrize("url", ["https://host/path", "hf://buckets/path", "/local/path", "s3://"])
def test_checkpoints_are_kept_in_object_stores_only(url: str) -> None:
    with pytest.raises(UserError, match=rf"checkpoint.directory = '{url}' "):
        run_from_table({"checkpoint": {"directory": url}})


@pytest.mark.parametrize(
    "source", ["hf:org/name", "hf:/data/saved", "stdlib", "a/b*.txt", "C:/text", "x:y", "a//b", "s3://b/a?.txt"]
)
def test_names_of_datasets_and_local_paths_are_sources(source: str) -> None:
    assert run_from_table({"data": {"train": source}}).data.train == [source]


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
