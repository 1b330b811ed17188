"""Checks of tokenized pairs: their tokenizer, and ids outside its vocabulary."""

import json
from pathlib import Path

import numpy as np
import pytest

from phalanx.data import source_checks
from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.source_checks import check_paths, check_sources, check_vocabulary, describe_unchecked_pairs
from phalanx.data.tokenizer import byte_tokenizer, load_tokenizer, train_bpe
from phalanx.spec.errors import UserError
from tests.helpers.indexed_pairs import write_indexed_pair


def test_check_sources_rejects_pair_of_another_tokenizer(make_data_spec, pair_of_text, tmp_path):
    pair, own = pair_of_text
    other = tmp_path / "other.json"
    vocab = load_tokenizer(own).vocab
    train_bpe(["return value + other"] * 50, vocab).save(other)
    data = make_data_spec(train=[pair], tokenizer=own)
    check_sources(data)
    assert describe_unchecked_pairs(data) is None
    for field in ("train", "held_out"):
        sources = {"train": [str(write_indexed_pair(tmp_path / "unknown", [[1, 2]]))]} | {field: [pair]}
        with pytest.raises(UserError, match="was tokenized with another tokenizer") as caught:
            check_sources(make_data_spec(**sources, tokenizer=str(other)))
        assert caught.value.field == f"data.{field}"
        assert caught.value.fix


def test_check_sources_accepts_equal_tokenizer_in_another_spelling(make_data_spec, pair_of_text, tmp_path):
    pair, own = pair_of_text
    table = json.loads(Path(own).read_text())
    table["model"]["merges"] = [" ".join(merge) for merge in table["model"]["merges"]]
    (tmp_path / "old.json").write_text(json.dumps(table))
    check_sources(make_data_spec(train=[pair], tokenizer=str(tmp_path / "old.json")))


def test_pairs_without_metadata_of_their_own_are_reported(make_data_spec, pair_of_text):
    pair, own = pair_of_text
    data = make_data_spec(train=[pair], tokenizer=own)
    write_indexed_pair(pair, [[1, 2, 3]])  # as another program would; the metadata of the earlier tokens stays
    check_sources(data)
    assert f"data.tokenizer = {own!r} matches the tokens of {pair}, because" in describe_unchecked_pairs(data)
    Path(f"{pair}.meta.json").unlink()
    assert f"{pair} and 1 more" in describe_unchecked_pairs(make_data_spec(train=[pair, pair], tokenizer=own))
    assert describe_unchecked_pairs(make_data_spec()) is None


def test_check_vocabulary_samples_large_dataset_for_invalid_ids(tmp_path, monkeypatch):
    monkeypatch.setattr(source_checks, "MAX_FULL_CHECK_TOKENS", 100_000)
    ids = np.ones(300_000, np.int64)
    ids[-1] = 999
    dataset = IndexedDataset(write_indexed_pair(tmp_path / "tokens", [ids]))
    with pytest.raises(UserError, match="has token id 999"):
        check_vocabulary(dataset, byte_tokenizer(), "data.train")


def test_check_paths_names_the_field_of_a_missing_source(make_data_spec, tmp_path):
    check_paths(make_data_spec())
    for field in ("train", "held_out"):
        with pytest.raises(UserError, match=rf"data\.{field} = .*missing.* does not exist"):
            check_paths(make_data_spec(**{field: [str(tmp_path / "missing.txt")]}))
