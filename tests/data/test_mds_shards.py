"""Shards that MDSWriter of mosaicml-streaming 0.13.0 wrote (`mds_shards/`), and damaged copies of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow
import pytest

from phalanx.data.bad_records import BadRecords
from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.prepare_shards import prepare_shards
from phalanx.data.record_formats import TextFormat
from phalanx.data.source_checks import check_sources
from phalanx.data.sources import documents
from phalanx.data.tokenize import tokenize_documents
from phalanx.data.tokenizer import Tokenizer, byte_tokenizer
from phalanx.spec.errors import UserError
from phalanx.spec.run import DataSpec

SHARDS = Path(__file__).parent / "mds_shards"
TEXTS = [f"document {number} é " * (number + 1) for number in range(7)]


@pytest.mark.parametrize(
    ("folder", "column"),
    [("plain", "text"), ("plain", "raw"), ("zstd", "text")],
    ids=["str", "bytes", "json in zstd"],
)
def test_shards_have_the_text_of_their_writer(folder: str, column: str) -> None:
    assert [document.text for document in documents([str(SHARDS / folder)], TextFormat(column))] == TEXTS
    assert next(documents([str(SHARDS / folder / "shard.*")], TextFormat(column))).name.endswith(":1")


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("free", [[50 * token for token in range(number + 1)] for number in range(5)]),
        ("typed", [[token % 250 for token in range(300 * number, 300 * number + 3)] for number in range(5)]),
        ("fixed", [[number + token for token in range(4)] for number in range(5)]),
    ],
)
def test_arrays_are_tokens(tmp_path: Path, column: str, expected: list[list[int]]) -> None:
    read = [document.tokens for document in documents([str(SHARDS / "tokens")], TextFormat(column))]
    assert [None if tokens is None else tokens.tolist() for tokens in read] == expected
    prepare_shards([str(SHARDS / "tokens")], byte_tokenizer(), tmp_path / "pair", records=TextFormat(column))
    dataset = IndexedDataset(tmp_path / "pair")
    assert [dataset.document(number).tolist() for number in range(5)] == [[*tokens, 256] for tokens in expected]


def test_shard_without_compression_is_read_once_if_both_are_there(tmp_path: Path) -> None:
    shutil.copytree(SHARDS / "zstd", tmp_path / "both")
    for file in sorted((SHARDS / "zstd").glob("*.zstd")):
        stream = pyarrow.CompressedInputStream(pyarrow.OSFile(str(file)), "zstd")
        (tmp_path / "both" / file.stem).write_bytes(stream.read())
    assert [document.text for document in documents([str(tmp_path / "both")])] == TEXTS


def test_truncated_shard_is_one_broken_record(tmp_path: Path) -> None:
    content = (SHARDS / "plain" / "shard.00000.mds").read_bytes()
    (tmp_path / "a.mds").write_bytes(content[:-5])
    (tmp_path / "b.mds").write_bytes(content)
    bad_records = BadRecords(limit=1)
    names = [document.name for document in documents([str(tmp_path)], bad_records=bad_records)]
    assert names == ["a.mds:1", "b.mds:1", "b.mds:2"]
    assert "after sample 1: it is truncated" in bad_records.list[0].reason


@pytest.mark.parametrize(
    ("folder", "column", "field", "message"),
    [
        ("pickles", "text", "data.train", "has the column 'other' of pickles"),
        ("plain", "body", "data.text_key", "is not a field of"),
        ("tokens", "n", "data.text_key", "is a column of encoding 'uint8'"),
    ],
)
def test_columns_that_are_not_text_are_refused(folder: str, column: str, field: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        check_sources(DataSpec(train=str(SHARDS / folder), text_key=column, tokenizer="bytes", max_bad_records=9))
    assert caught.value.field == field
    assert caught.value.fix


def test_missing_shard_of_an_index_is_an_error(tmp_path: Path) -> None:
    shutil.copytree(SHARDS / "plain", tmp_path / "plain")
    (tmp_path / "plain" / "shard.00003.mds").unlink()
    with pytest.raises(UserError, match=r"lists shard\.00003\.mds, which does not exist"):
        list(documents([str(tmp_path / "plain")]))


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, b"\x01\0\0\0" + b"\x20\0\0\0" * 2 + b"{" * 20])
def test_other_content_is_not_a_shard(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.mds").write_bytes(content)
    with pytest.raises(UserError, match="cannot be read"):
        list(documents([str(tmp_path / "a.mds")]))


def test_tokens_need_their_own_tokenizer(tmp_path: Path) -> None:
    tokens = str(SHARDS / "tokens")
    with pytest.raises(UserError, match="contains tokens instead of text"):
        check_sources(DataSpec(train=tokens, text_key="typed", cache=str(tmp_path)))
    small = Tokenizer(vocab=100, end=99)
    with pytest.raises(UserError, match="has token id 100, but the tokenizer only has ids 0 to 99"):
        list(tokenize_documents(documents([tokens], TextFormat("free")), small))
