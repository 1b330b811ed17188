"""Shards of any number of processes and nodes become the pair of one process, byte for byte, also after a kill."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data import prepare_shards as module
from phalanx.data.bad_records import BadRecords
from phalanx.data.pair_metadata import PAIR_SUFFIXES
from phalanx.data.prepare_shards import COMPLETE_SUFFIX, plan_shards, prepare_shards
from phalanx.data.record_formats import TextFormat
from phalanx.data.sources import SourceFile, documents, list_source_files, read_documents
from phalanx.data.tokenize import write_indexed_pairs
from phalanx.data.tokenizer import byte_tokenizer, train_bpe
from phalanx.spec.errors import UserError

TOKENIZER = train_bpe(["a line of text number 0123456789\n"] * 20, 300)


@pytest.fixture
def corpus_of_formats(tmp_path: Path) -> Path:
    """A folder with large files of JSON lines and Parquet, and small ones."""
    folder = tmp_path / "text"
    folder.mkdir()
    lines = [json.dumps({"text": f"line {number} " * (number % 40)}) for number in range(300)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    rows = {"text": [f"row {number} " * (number % 30) for number in range(300)]}
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / "b.parquet", row_group_size=40, compression="none")
    for number in range(20):
        (folder / f"c{number:02d}.txt").write_text(f"file {number}\n" * number)
    return folder


def read_pair(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in PAIR_SUFFIXES]


def reference_pair(folder: Path, prefix: Path) -> list[bytes]:
    write_indexed_pairs(documents([str(folder)]), TOKENIZER, [prefix])
    return read_pair(prefix)


@pytest.mark.parametrize("nodes", [1, 3])
def test_nodes_write_the_pair_of_one_process(
    corpus_of_formats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 3000)
    expected = reference_pair(corpus_of_formats, tmp_path / "expected")
    prefix = tmp_path / "pair"
    for node_rank in range(nodes):
        assert not Path(f"{prefix}.bin").exists()
        prepared = prepare_shards([str(corpus_of_formats)], TOKENIZER, prefix, nodes=nodes, node_rank=node_rank)
    assert prepared.num_shards > 20
    assert prepared.num_missing == 0
    assert read_pair(prefix) == expected
    assert sorted(path.name for path in tmp_path.glob("pair*")) == ["pair.bin", "pair.idx", "pair.meta.json"]


def test_workers_write_the_pair_of_one_process(corpus_of_formats: Path, tmp_path: Path) -> None:
    """Workers import the module again, with its normal size of shards: each file is one here."""
    text = (corpus_of_formats / "a.jsonl").read_text() + "\n"
    for name in ("d.jsonl", "e.jsonl"):
        (corpus_of_formats / name).write_text(text)
    shards = [[file] for file in list_source_files([str(corpus_of_formats)])]
    sharded = module.ShardedText(shards, TextFormat(), True, 0, tmp_path / "pair.shards")
    module._write_plan(sharded, TOKENIZER, force=False)
    counts = list(module._tokenize_shards(sharded, range(len(shards)), workers=2))
    assert len(counts) == len(shards)
    joined = module._join_shards(sharded, TOKENIZER, tmp_path / "pair")
    assert joined.counts.documents == sum(count.documents for count in counts)
    assert read_pair(tmp_path / "pair") == reference_pair(corpus_of_formats, tmp_path / "expected")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 40), st.booleans())
def test_parts_of_lines_have_each_line_once(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], size: int, ends: bool
) -> None:
    lines = [json.dumps({"text": f"{number}" + "x" * count}) for number, count in enumerate(sizes)]
    lines.insert(len(lines) // 2, "{broken")
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_text("\n".join(lines) + "\n" * ends)
    total = path.stat().st_size
    bad_records = BadRecords(limit=1)
    texts = []
    for start in range(0, total, size):
        file = SourceFile(kind="json_lines", path=str(path), name="a", span=(start, min(start + size, total)))
        texts += [document.text for document in read_documents(file, bad_records=bad_records)]
    assert texts == [f"{number}" + "x" * count for number, count in enumerate(sizes)]
    assert [record.record for record in bad_records.list] == [len(sizes) // 2 + 1]


def test_repeated_command_keeps_complete_shards(
    corpus_of_formats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 3000)
    expected = reference_pair(corpus_of_formats, tmp_path / "expected")
    prefix = tmp_path / "pair"
    prepare_shards([str(corpus_of_formats)], TOKENIZER, prefix, nodes=2, node_rank=1)
    complete = {path: path.stat().st_mtime_ns for path in (tmp_path / "pair.shards").glob(f"*{COMPLETE_SUFFIX}")}
    first = sorted(complete)[0]
    first.unlink()  # as after a kill before its end
    tokenized = []
    write = module._tokenize_shard
    monkeypatch.setattr(module, "_tokenize_shard", lambda text, number: tokenized.append(number) or write(text, number))
    prepare_shards([str(corpus_of_formats)], TOKENIZER, prefix, nodes=2, node_rank=1)
    assert tokenized == [1]
    prepared = prepare_shards([str(corpus_of_formats)], TOKENIZER, prefix)
    assert len(tokenized) == 1 + prepared.num_shards - len(complete)
    assert read_pair(prefix) == expected


def test_node_that_finishes_with_another_finds_the_joined_pair(
    corpus_of_formats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / "pair"
    tokenize = module._tokenize_shards

    def finish_after_another(text: module.ShardedText, numbers: Sequence[int], workers: int) -> Iterator[Any]:
        yield from tokenize(text, numbers, workers)
        module._join_shards(text, TOKENIZER, prefix)

    monkeypatch.setattr(module, "_tokenize_shards", finish_after_another)
    prepared = prepare_shards([str(corpus_of_formats)], TOKENIZER, prefix)
    assert prepared.num_missing == 0
    assert read_pair(prefix) == reference_pair(corpus_of_formats, tmp_path / "expected")


def test_shards_of_other_settings_are_refused_or_discarded(corpus_of_formats: Path, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("more")
    sources = [str(corpus_of_formats), str(tmp_path / "more.txt")]
    shards = [[file] for file in list_source_files(sources)]
    sharded = module.ShardedText(shards, TextFormat(), True, 0, tmp_path / "pair.shards")
    module._write_plan(sharded, TOKENIZER, force=False)
    module._tokenize_shard(sharded, 0)
    with pytest.raises(UserError, match="has shards of other text") as caught:
        prepare_shards(sources, TOKENIZER, tmp_path / "pair", end=False)
    assert "--force" in caught.value.fix
    prepare_shards(sources, TOKENIZER, tmp_path / "pair", end=False, force=True)
    assert not (tmp_path / "pair.shards").exists()


def test_limit_of_broken_records_holds_for_all_shards(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "abc"}\n{\n')
    shards = [[file] for file in list_source_files([str(tmp_path)])]
    for limit, expected in ((1, "is too low: 2 records are broken"), (2, None)):
        sharded = module.ShardedText(shards, TextFormat(), True, limit, tmp_path / "pair.shards")
        module._write_plan(sharded, TOKENIZER, force=False)
        for number in range(2):
            module._tokenize_shard(sharded, number)
        if expected:
            with pytest.raises(UserError, match=expected):
                module._join_shards(sharded, TOKENIZER, tmp_path / "pair")
        else:
            assert len(module._join_shards(sharded, TOKENIZER, tmp_path / "pair").bad_records) == 2


def test_large_files_are_divided(corpus_of_formats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = list_source_files([str(corpus_of_formats)])
    assert plan_shards(files, "SOURCE") == [files]
    monkeypatch.setattr(module, "SHARD_BYTES", 20_000)
    parts = [part for shard in plan_shards(files, "SOURCE") for part in shard]
    assert [part.span for part in parts if part.kind == "parquet"] == [(group, group + 1) for group in range(8)]
    assert [part.span for part in parts if part.kind == "json_lines"][:2] == [(0, 20_000), (20_000, 40_000)]


def test_killed_command_continues(corpus_of_formats: Path, tmp_path: Path) -> None:
    """With workers: they end with the command, and the repeated one writes the pair of one process."""
    lines = (corpus_of_formats / "a.jsonl").read_text() + "\n"
    for name in ("a.jsonl", "d.jsonl", "e.jsonl"):
        (corpus_of_formats / name).write_text(lines * 400)
    command = [sys.executable, "-m", "phalanx", "data", "prepare", str(corpus_of_formats)]
    command += ["--out", str(tmp_path / "pair"), "--tokenizer", "bytes", "--workers", "2"]
    process = subprocess.Popen(command)
    folder = tmp_path / "pair.shards"
    deadline = time.monotonic() + 120
    while not list(folder.glob(f"*{COMPLETE_SUFFIX}")):
        assert process.poll() is None, "the command ended before it was killed"
        assert time.monotonic() < deadline, "no shard is complete"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    assert not Path(f"{tmp_path / 'pair'}.bin").exists()
    subprocess.run(command, check=True, timeout=120)
    write_indexed_pairs(documents([str(corpus_of_formats)]), byte_tokenizer(), [tmp_path / "expected"])
    assert read_pair(tmp_path / "pair") == read_pair(tmp_path / "expected")
