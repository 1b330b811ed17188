"""Fixtures of several test files of data/."""

from __future__ import annotations

import pytest

from phalanx.data.sources import documents
from phalanx.data.tokenize import write_indexed_pairs
from phalanx.data.tokenizer import train_bpe
from phalanx.spec.run import DataSpec


@pytest.fixture
def make_data_spec(corpus, tmp_path):
    """A DataSpec over the small corpus, with a cache of its own."""

    def build(**options):
        options = {"train": [str(corpus)], "cache": str(tmp_path / "cache"), "held_out_fraction": 0.2} | options
        return DataSpec(**{"tokenizer": "bytes"} | options)

    return build


@pytest.fixture
def pair_of_text(corpus, tmp_path):
    """A tokenized pair, and the file of its tokenizer."""
    tokenizer = train_bpe(["def function(x):\n"] * 50, 300)
    tokenizer.save(tmp_path / "own.json")
    write_indexed_pairs(documents([str(corpus)]), tokenizer, [tmp_path / "pair"])
    return str(tmp_path / "pair"), str(tmp_path / "own.json")
