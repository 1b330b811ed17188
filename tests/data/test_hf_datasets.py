"""Hugging Face datasets: repositories with configurations, directories by save_to_disk, the offline cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from phalanx.data.bad_records import BadRecords
from phalanx.data.prepare import prepare
from phalanx.data.record_formats import TextFormat
from phalanx.data.source_checks import check_sources
from phalanx.data.sources import documents, list_source_files, read_records
from phalanx.data.streaming_loader import StreamingLoader
from phalanx.data.tokenizer import byte_tokenizer
from phalanx.spec.errors import UserError
from phalanx.spec.mixture import SourceSpec
from phalanx.spec.run import DataSpec
from tests.helpers.batches import batch_rows

datasets = pytest.importorskip("datasets")

CONFIGS = """---
configs:
- config_name: en
  data_files:
  - {split: train, path: en/train.jsonl}
  - {split: test, path: en/test.jsonl}
- config_name: de
  data_files:
  - {split: train, path: de/train.jsonl}
---
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset repository with two configurations, in an empty cache without a network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    folder = tmp_path / "repository"
    for config in ("en", "de"):
        (folder / config).mkdir(parents=True)
        for split in ("train", "test"):
            rows = [{"text": f"{config} {split} {number}", "id": number} for number in range(5)]
            (folder / config / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "README.md").write_text(CONFIGS)
    return folder


def texts(source: object, **options: Any) -> list[str]:
    return [document.text for document in documents([str(source)], **options)]


def test_repository_has_configurations_and_splits(repository: Path) -> None:
    assert texts(f"hf:{repository}:en") == [f"en train {number}" for number in range(5)]
    assert texts(f"hf:{repository}:en:test") == [f"en test {number}" for number in range(5)]
    assert texts(f"hf:{repository}:de")[0] == "de train 0"
    assert not list((repository.parent / "cache").rglob("*.arrow"))  # nothing is converted


@pytest.mark.parametrize(
    ("suffix", "message", "fix"),
    [
        ("", "has several configurations", "hf:{folder}:en, hf:{folder}:de"),
        (":fr", "has no configuration 'fr'", "hf:{folder}:en, hf:{folder}:de"),
        (":de:test", "has no split 'test'", "hf:{folder}:de:train"),
        (":en:dev", "has no split 'dev'", "hf:{folder}:en:train, hf:{folder}:en:test"),
    ],
)
def test_missing_configuration_or_split_lists_those_that_exist(
    repository: Path, suffix: str, message: str, fix: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        check_sources(DataSpec(train=f"hf:{repository}{suffix}", tokenizer="bytes"))
    assert (caught.value.field, caught.value.fix) == ("data.train", f"use one of {fix.format(folder=repository)}")


def test_dataset_saved_to_disk_is_read_by_split(repository: Path, tmp_path: Path) -> None:
    rows = {name: {"text": [f"{name} {number}" for number in range(9)]} for name in ("train", "dev")}
    splits = {name: datasets.Dataset.from_dict(rows[name], split=name) for name in rows}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "several")
    splits["dev"].save_to_disk(tmp_path / "one", num_shards=3)
    for source in (f"hf:{tmp_path / 'several'}::dev", f"hf:{tmp_path / 'one'}", f"{tmp_path / 'one'}"):
        assert texts(source) == rows["dev"]["text"]
    assert texts(tmp_path / "one" / "data-00001-of-00003.arrow") == rows["dev"]["text"][3:6]
    assert texts(tmp_path / "several")[0] == "train 0"
    with pytest.raises(UserError, match="has no split 'test'") as caught:
        texts(f"hf:{tmp_path / 'several'}::test")
    assert caught.value.fix == f"use one of hf:{tmp_path / 'several'}::train, hf:{tmp_path / 'several'}::dev"
    with pytest.raises(UserError, match="has no split 'train'"):
        texts(f"hf:{tmp_path / 'one'}::train")
    with pytest.raises(UserError, match="has no configuration 'en'"):
        texts(f"hf:{tmp_path / 'several'}:en")


def test_dataset_of_the_hub_is_read_from_the_offline_cache(repository: Path, tmp_path: Path) -> None:
    """The cache has what `load_dataset` wrote when there was a network: its folders are named like the dataset."""
    datasets.load_dataset(str(repository), "en")
    (written,) = (tmp_path / "cache").glob("*/en/0.0.0/*/")
    cached = tmp_path / "cache" / "org___name" / "en" / "0.0.0" / ("0" * 40)
    shutil.move(written, cached)
    for file in cached.glob("repository-*"):
        file.rename(cached / file.name.replace("repository", "name"))
    info = json.loads((cached / "dataset_info.json").read_text())
    (cached / "dataset_info.json").write_text(json.dumps(info | {"dataset_name": "name"}))
    assert texts("hf:org/name:en:test") == [f"en test {number}" for number in range(5)]
    with pytest.raises(UserError, match="has no split 'dev'"):
        texts("hf:org/name:en:dev")
    with pytest.raises(UserError, match="cannot be loaded: Couldn't reach 'org/other'"):
        texts("hf:org/other")


def test_dataset_that_needs_other_code_is_refused(repository: Path) -> None:
    (repository / "README.md").unlink()
    for file in repository.rglob("*.jsonl"):
        file.unlink()
    (repository / "train.pkl").write_bytes(b"cos\nsystem\n")
    (repository / "repository.py").write_text("raise SystemExit")
    with pytest.raises(UserError, match=r"cannot be loaded|are allowed"):
        texts(f"hf:{repository}")


def test_rows_from_an_index_on_skip_those_before(repository: Path) -> None:
    (file,) = list_source_files([f"hf:{repository}:en"])
    assert [record.text for record in read_records(file, first=3)] == ["en train 3", "en train 4"]  # type: ignore[union-attr]
    assert [record.name for record in read_records(file, first=3)] == ["hf:4", "hf:5"]  # type: ignore[union-attr]


def test_missing_column_names_those_with_text(repository: Path) -> None:
    with pytest.raises(UserError, match=r"data\.text_key = 'body'") as caught:
        texts(f"hf:{repository}:en", records=TextFormat("body"), bad_records=BadRecords(9))
    assert caught.value.fix == "use one of its text fields: 'text'"


def test_source_of_a_mixture_has_configuration_and_split(repository: Path, tmp_path: Path) -> None:
    sources: list[dict[str, Any]] = [
        {"name": "en", "path": f"hf:{repository}", "config": "en", "split": "test", "weight": 1},
        {"name": "de", "path": f"hf:{repository}", "config": "de", "weight": 1},
    ]
    options: dict[str, Any] = {"tokenizer": "bytes", "cache": str(tmp_path / "tokens"), "held_out_fraction": 0.5}
    prepared = prepare(DataSpec(source=[SourceSpec(**source) for source in sources], **options))
    assert [Path(prefix).with_suffix(".bin").is_file() for prefix in prepared.sources] == [True, True]
    sources[1]["split"] = "test"
    with pytest.raises(UserError, match="has no split 'test'") as caught:
        check_sources(DataSpec(source=[SourceSpec(**source) for source in sources], **options))
    assert caught.value.field == "data.source[1].path"
    for path, message in (("texts", "belongs to Hugging Face datasets"), ("hf:texts:de", "is also in path")):
        sources[1]["path"] = path
        with pytest.raises(UserError, match=message) as caught:
            check_sources(DataSpec(source=[SourceSpec(**source) for source in sources], **options))
        assert caught.value.field == "data.source[1].config"


def test_stream_of_a_dataset_resumes_within_it(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "held_out.txt").write_text("other")
    options: dict[str, Any] = {"held_out": [str(tmp_path / "held_out.txt")], "streaming": True}
    data = DataSpec(train=[f"hf:{repository}:en:train"], **options)
    loader = StreamingLoader(data, byte_tokenizer(), 8, 2, seed=0)
    states, batches = [], []
    for step in range(6):
        states.append(loader.state(step))
        batches.append(batch_rows(loader.step(step)))
    assert states[-1]["epoch"] == 1
    for step, state in enumerate(states):
        resumed = StreamingLoader(data, byte_tokenizer(), 8, 2, seed=0)
        resumed.resume(state)
        assert batch_rows(resumed.step(step)) == batches[step]
