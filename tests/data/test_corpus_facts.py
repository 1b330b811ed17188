"""Facts about text and tokens equal those that are counted one document after the other."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.corpus_facts import CorpusFacts, DocumentPart, facts_of_run, histogram
from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.loader import TokenLoader
from phalanx.data.object_cache import object_cache
from phalanx.data.record_formats import TextFormat
from phalanx.data.source_checks import TextField
from phalanx.data.tokenizer import byte_tokenizer
from phalanx.spec.errors import UserError
from phalanx.spec.run import DataSpec
from tests.helpers.indexed_pairs import write_indexed_pair

TOKENIZER = byte_tokenizer()


def facts_of_files(*paths: Path, seq_len: int = 8, rows: int = 2) -> CorpusFacts:
    facts = CorpusFacts(TOKENIZER, rows, seq_len)
    for path in paths:
        facts.add_source(path.name, TextField("SOURCE", [str(path)], TextFormat(), 0))
    return facts


@settings(max_examples=50)
@given(st.lists(st.integers(0, 5000), min_size=1))
def test_histogram_has_every_document_once(lengths: list[int]) -> None:
    bins = histogram(np.array(lengths))
    assert sum(each.documents for each in bins) == len(lengths)
    for each in bins:
        assert each.documents == sum(each.low <= length < each.high for length in lengths)


def test_text_has_its_documents_duplicates_and_faults(tmp_path: Path) -> None:
    texts = ["aa", "b", "aa", "caf\ufffd", "aa", "b", "long " * 9]
    lines = [json.dumps({"text": text}) for text in texts]
    lines.insert(2, "{broken")
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    (tmp_path / "c.txt").write_text("b")
    facts = facts_of_files(*(tmp_path / name for name in ("a.jsonl", "b.txt", "c.txt")))
    lines_facts, latin, _ = facts.sources
    sizes = [len(text.encode()) for text in texts]
    assert (lines_facts.documents, lines_facts.text_bytes, lines_facts.tokens) == (7, sum(sizes), sum(sizes) + 7)
    assert max(lines_facts.longest) == (46, "a.jsonl:8")
    assert [record.record for record in lines_facts.bad_records] == [3]
    assert (lines_facts.bad_encodings, latin.bad_encodings) == (["a.jsonl:5"], ["b.txt"])
    copies = Counter([*texts, "caf\xe9", "b"])
    duplicates = facts.duplicates()
    assert duplicates.documents == sum(count - 1 for count in copies.values())
    assert sorted(duplicates.examples) == [["a.jsonl:1", "a.jsonl:4", "a.jsonl:6"], ["a.jsonl:2", "a.jsonl:7", "c.txt"]]


def test_text_of_another_field_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "a"}\n')
    with pytest.raises(UserError, match=r"has no text: 1 broken record skipped; the first: data.text_key = 'text'"):
        facts_of_files(tmp_path / "a.jsonl")


def test_rows_of_text_show_where_documents_begin(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ("abc", "defgh", "ij", "k")))
    (source,) = facts_of_files(tmp_path / "a.jsonl").sources
    end = TOKENIZER.end
    assert source.rows == [
        [DocumentPart(0, [97, 98, 99, end], "abc"), DocumentPart(4, [100, 101, 102, 103], "defg")],
    ]
    (source,) = facts_of_files(tmp_path / "a.jsonl", rows=0).sources
    assert source.rows == []


def test_held_out_sets_of_a_run_have_their_names(tmp_path: Path) -> None:
    for name in ("train", "prose", "code"):
        (tmp_path / f"{name}.txt").write_text(name)
    train, prose, code = ([str(tmp_path / f"{name}.txt")] for name in ("train", "prose", "code"))
    data = DataSpec(train=train, held_out_sets={"prose": prose, "code": code}, tokenizer="bytes")
    facts = facts_of_run(data, rows=1, seq_len=2, progress=lambda *_: None)
    names = ["data.train", "held-out prose", "held-out code"]
    assert [(source.name, source.text_bytes) for source in facts.sources] == list(zip(names, (5, 5, 4), strict=True))


def test_rows_of_pair_are_those_of_a_run(tmp_path: Path) -> None:
    prefix = write_indexed_pair(tmp_path / "pair", [[1, 2, 3, 256], [4, 5, 6, 7, 8, 256], [1, 2, 3, 256]] * 2)
    facts = facts_of_files(Path(prefix))
    (source,) = facts.sources
    batch = TokenLoader(IndexedDataset(prefix), 8, 2, seed=0).step(0)
    assert [[token for part in row for token in part.tokens] for row in source.rows] == batch.tokens.tolist()
    assert batch.document_starts is not None
    assert [[part.start for part in row] for row in source.rows] == [
        np.unique(r).tolist() for r in batch.document_starts
    ]
    assert (source.tokens, source.documents, facts.duplicates().documents) == (28, 6, 4)


def test_facts_of_a_run_use_its_cache_of_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.data.object_cache._default_cache", None)
    (tmp_path / "a.txt").write_text("text")
    data = DataSpec(train=[str(tmp_path / "a.txt")], tokenizer="bytes", cache=str(tmp_path / "cache"))
    facts_of_run(data, rows=0, seq_len=8, progress=lambda counts: None)
    assert object_cache().directory == tmp_path / "cache"
