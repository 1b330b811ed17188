"""Files and lines of documents, for text that was split by names or at its end, and for pairs."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.data.document_locations import locate_documents
from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.prepare import prepare
from phalanx.data.tokenizer import byte_tokenizer
from phalanx.spec.run import DataSpec
from tests.helpers.indexed_pairs import write_indexed_pair


def train_data(train: list[str] | str, cache: Path, **fields: object) -> tuple[DataSpec, IndexedDataset]:
    """Return the description of some text, and its tokens for training."""
    data = DataSpec.model_validate({"train": train, "tokenizer": "bytes", "cache": str(cache), **fields})
    return data, IndexedDataset(prepare(data).train)


@pytest.mark.parametrize("holds_file_out", [False, True])
def test_documents_of_text_have_their_files(holds_file_out: bool, corpus: Path, tmp_path: Path) -> None:
    fields = {"held_out": [str(corpus / "part0" / "file00.py")]} if holds_file_out else {"held_out_fraction": 0.3}
    train = str(corpus / "part1") if holds_file_out else str(corpus)
    data, dataset = train_data(train, tmp_path / "cache", **fields)
    locations = locate_documents(data, dataset, byte_tokenizer(), range(len(dataset)))
    assert len(locations) == len(dataset) == (20 if holds_file_out else len(set(locations.values())))
    for number, location in locations.items():
        assert byte_tokenizer().decode(dataset.document(number)[:-1]) == Path(location).read_text()


def test_documents_of_text_split_at_its_end_have_their_lines(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"text": "abc"}\n\n{"text": ""}\n{"text": "def"}\n')
    data, dataset = train_data(str(tmp_path / "one.jsonl"), tmp_path / "cache", held_out_fraction=1e-9)
    locations = locate_documents(data, dataset, byte_tokenizer(), [0, 1])
    assert locations == {0: f"{tmp_path}/one.jsonl:1", 1: f"{tmp_path}/one.jsonl:4"}


def test_changed_document_has_no_location(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"text": "abc"}\n{"text": "def"}\n{"text": "ghi"}\n')
    data, dataset = train_data(str(tmp_path / "one.jsonl"), tmp_path / "cache", held_out_fraction=1e-9)
    (tmp_path / "one.jsonl").write_text('{"text": "abc"}\n{"text": "xyz"}\n{"text": "ghi"}\n')
    assert locate_documents(data, dataset, byte_tokenizer(), [0, 1]) == {0: f"{tmp_path}/one.jsonl:1"}


def test_documents_of_pairs_have_their_pair_and_number(tmp_path: Path) -> None:
    prefixes = [
        write_indexed_pair(tmp_path / "first", [[1, 2], [3], [4, 5, 6]]),
        write_indexed_pair(tmp_path / "second", [[7], [8, 9, 10], [11]]),
    ]
    data, dataset = train_data([str(prefix) for prefix in prefixes], tmp_path / "cache", held_out_fraction=0.1)
    locations = locate_documents(data, dataset, byte_tokenizer(), range(len(dataset)))
    assert list(locations.values()) == [
        *(f"{tmp_path}/first.bin: document {number}" for number in range(len(dataset) - 2)),
        *(f"{tmp_path}/second.bin: document {number}" for number in range(2)),
    ]
    data, dataset = train_data(str(prefixes[0]), tmp_path / "cache", held_out=[str(prefixes[1])])
    assert locate_documents(data, dataset, byte_tokenizer(), [2]) == {2: f"{tmp_path}/first.bin: document 2"}
