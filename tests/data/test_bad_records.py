"""Broken records of real files are skipped up to a limit, and listed with their place and reason."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from phalanx.data.bad_records import (
    BAD_RECORDS_FILE,
    BadRecord,
    BadRecords,
    read_bad_records,
    write_bad_records,
)
from phalanx.data.prepare import prepare
from phalanx.data.sources import documents
from phalanx.data.streaming_loader import StreamingLoader
from phalanx.data.tokenizer import byte_tokenizer
from phalanx.runs.create import write_run_directory
from phalanx.runs.summary import summarize_run
from phalanx.spec.errors import UserError
from phalanx.spec.run import DataSpec
from tests.helpers.batches import batch_rows
from tests.helpers.small_runs import small_run

LINES = [json.dumps({"text": f"document {number}"}) for number in range(1, 7)]


def write_dirty_lines(path: Path) -> None:
    lines: list[Any] = [line.encode() for line in LINES]
    lines[1] = b'{"text": "cut'
    lines[2] = b'{"text": null}'
    lines[3] = b'{"body": "other"}'
    lines[4] = b'{"text": "\xff"}'
    path.write_bytes(b"\n".join(lines))


def write_truncated_lines(path: Path) -> None:
    """Write two members, of which the second has lost its end."""
    content = "\n".join(LINES) + "\n"
    path.write_bytes(gzip.compress(content.encode()) + gzip.compress(content.encode())[:-30])


def write_damaged_row_group(path: Path) -> None:
    """Write three row groups of two rows, and overwrite the page of the second."""
    table = pyarrow.table({"text": [f"document {number}" * 50 for number in range(1, 7)]})
    pyarrow.parquet.write_table(table, path, row_group_size=2, compression="snappy", use_dictionary=False)
    column = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    end = column.data_page_offset + column.total_compressed_size
    content[end - 40 : end] = b"\xff" * 40
    path.write_bytes(content)


def write_invalid_utf8_row(path: Path) -> None:
    text = pyarrow.array([b"document 1", b"caf\xe9", b"document 3"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), path)


def write_truncated_arrow(path: Path) -> None:
    table = pyarrow.table({"text": [f"document {number}" for number in range(1, 7)]})
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    path.write_bytes(path.read_bytes()[:-60])


CASES = [
    pytest.param("a.jsonl", write_dirty_lines, [2, 3, 4, 5], [1, 6], r"a.jsonl:2' is not valid JSON", id="lines"),
    pytest.param("a.jsonl.gz", write_truncated_lines, [None], [1, 2, 3, 4, 5, 6], "ended before", id="truncated gz"),
    pytest.param("a.parquet", write_damaged_row_group, [3], [1, 2, 5, 6], "rows 3 to 4 in a damaged", id="row group"),
    pytest.param("a.parquet", write_invalid_utf8_row, [2], [1, 3], "that is not UTF-8", id="parquet text"),
    pytest.param("a.arrow", write_truncated_arrow, [None], [1, 2, 3, 4], "damaged after row 4", id="truncated arrow"),
]


@pytest.mark.parametrize(("name", "write", "broken", "intact", "reason"), CASES)
def test_broken_records_are_skipped_up_to_the_limit(
    tmp_path: Path, name: str, write: Any, broken: list[int | None], intact: list[int], reason: str
) -> None:
    write(tmp_path / name)
    bad_records = BadRecords(limit=len(broken))
    names = [document.name for document in documents([str(tmp_path / name)], bad_records=bad_records)]
    assert names == [f"{name}:{number}" for number in intact]
    assert [(record.file, record.record) for record in bad_records.list] == [(f"{tmp_path / name}", n) for n in broken]
    assert reason in bad_records.list[0].reason
    with pytest.raises(UserError) as caught:
        list(documents([str(tmp_path / name)], bad_records=BadRecords(limit=len(broken) - 1)))
    assert "data.max_bad_records" in caught.value.fix
    if len(broken) > 1:
        assert f"{len(broken) - 1} broken records, which data.max_bad_records allows" in caught.value.problem


def test_record_that_is_read_again_counts_once(tmp_path: Path) -> None:
    write_dirty_lines(tmp_path / "a.jsonl")
    bad_records = BadRecords(limit=4)
    for _ in range(2):
        assert len(list(documents([str(tmp_path / "a.jsonl")], bad_records=bad_records))) == 2
    assert len(bad_records.list) == 4


def test_missing_file_is_an_error_whatever_the_limit(tmp_path: Path) -> None:
    files = [str(tmp_path / "a.txt")]
    (tmp_path / "a.txt").write_text("text")
    reading = documents([*files, str(tmp_path)], bad_records=BadRecords(limit=9))
    next(reading)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UserError, match="No such file"):
        list(reading)


def test_list_is_read_up_to_a_damaged_line(tmp_path: Path) -> None:
    records = [BadRecord("a", 1, "is empty"), BadRecord("a", None, "ends")]
    write_bad_records(tmp_path / "list", records)
    with (tmp_path / "list").open("a") as file:
        file.write('{"file": "a", "rec')
    assert read_bad_records(tmp_path / "list") == records
    write_bad_records(tmp_path / "list", [])
    assert read_bad_records(tmp_path / "list") == []


def test_run_lists_the_broken_records_of_its_data(corpus: Path, tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write_dirty_lines(tmp_path / name)
    paths = [f"{tmp_path / name}" for name in ("a.jsonl", "b.jsonl")]
    sources = [{"name": "a", "path": paths[0], "weight": 1}, {"name": "b", "path": paths[1], "weight": 1}]
    options = {"tokenizer": "bytes", "cache": str(tmp_path / "cache"), "held_out_fraction": 0.5}
    sources[1]["max_bad_records"] = 3
    with pytest.raises(UserError, match=r"b.jsonl:5"):
        prepare(DataSpec(source=sources, max_bad_records=4, **options))
    sources[1]["max_bad_records"] = 4
    data = DataSpec(source=sources, max_bad_records=4, **options)
    prepared = prepare(data)
    assert [(Path(record.file).name, record.record) for record in prepared.bad_records] == [
        (name, number) for name in ("a.jsonl", "b.jsonl") for number in (2, 3, 4, 5)
    ]
    directory = write_run_directory(small_run(corpus, tmp_path / "runs", {}).replace(data=data), prepared)
    assert read_bad_records(directory / BAD_RECORDS_FILE) == prepared.bad_records
    assert summarize_run(directory).bad_records == 8


def test_stream_skips_broken_records_and_resumes(tmp_path: Path) -> None:
    """Batches are those of the same text without its broken records, also after a resume within a file."""
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("other text")
    for folder in ("clean", "dirty"):
        (tmp_path / folder).mkdir()
        for name in "ab":
            lines = [json.dumps({"text": f"{name} {number} " * 5}) for number in range(40)]
            if folder == "dirty":
                lines[3:3] = ["{", '{"text": 5}']
            (tmp_path / folder / f"{name}.jsonl").write_text("\n".join(lines))

    def stream(folder: str, file: Path | None = None) -> StreamingLoader:
        data = DataSpec(train=[f"{tmp_path / folder}"], held_out=[str(held_out)], streaming=True, max_bad_records=4)
        return StreamingLoader(data, byte_tokenizer(), 16, 6, seed=1, bad_records_file=file)

    clean, dirty = stream("clean"), stream("dirty", tmp_path / "list")
    states = []
    batches = []
    for step in range(30):
        states.append(dirty.state(step))
        batches.append(batch_rows(dirty.step(step)))
        assert batches[-1] == batch_rows(clean.step(step))
    assert states[-1]["epoch"] == 1
    assert [record.record for record in read_bad_records(tmp_path / "list")] == [4, 5, 4, 5]
    for step in (1, 7, 29):
        resumed = stream("dirty")
        resumed.resume(states[step])
        assert batch_rows(resumed.step(step)) == batches[step]
