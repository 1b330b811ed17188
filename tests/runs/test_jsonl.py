"""Tests of phalanx.runs.jsonl."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.runs.decode import decode_object
from phalanx.runs.jsonl import JsonlTail, lines_from_end, parse_jsonl, read_jsonl


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "records.jsonl"


def test_read_jsonl_returns_records_in_order(file: Path) -> None:
    file.write_text('{"step": 1}\n{"step": 2, "loss": null}\n')
    assert read_jsonl(file) == [{"step": 1}, {"step": 2, "loss": None}]


def test_read_jsonl_returns_empty_list_for_missing_file(file: Path) -> None:
    assert read_jsonl(file) == []


@pytest.mark.parametrize("torn", ['{"step": 2', '{"step": 2}', '{"name": "\\', " "])
def test_read_jsonl_ignores_last_line_without_newline(file: Path, torn: str) -> None:
    file.write_text('{"step": 1}\n' + torn)
    assert read_jsonl(file) == [{"step": 1}]


@pytest.mark.parametrize("damaged", [b"\xff\xfe\x00", b"", b"1", b"[]", b"null", b"{'step'}", b'{"step": 2'])
def test_read_jsonl_ignores_unreadable_lines(file: Path, damaged: bytes) -> None:
    file.write_bytes(b'{"step": 1}\n' + damaged + b'\n{"step": 3}\n')
    assert read_jsonl(file) == [{"step": 1}, {"step": 3}]


def test_parse_jsonl_yields_unreadable_lines_without_record() -> None:
    content = b'{"step": 1}\nnot JSON\n{"step": 3}\n{"st'
    assert list(parse_jsonl(content, decode_object)) == [
        (b'{"step": 1}', {"step": 1}),
        (b"not JSON", None),
        (b'{"step": 3}', {"step": 3}),
    ]


@given(
    sizes=st.lists(st.integers(0, 12), max_size=12),
    chunks=st.lists(st.integers(1, 30), max_size=30),
)
def test_jsonl_tail_returns_each_record_once_however_the_file_grows(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], chunks: list[int]
) -> None:
    file = tmp_path_factory.mktemp("tail") / "records.jsonl"
    written = [{"step": step, "ü": "é\u2028" * size} for step, size in enumerate(sizes)]
    content = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in written).encode()
    tail, read = JsonlTail(file), []
    with file.open("ab") as out:
        for chunk in [*chunks, len(content)]:
            out.write(content[:chunk])
            out.flush()
            content = content[chunk:]
            read += tail.read_new()[1]
    assert read == written == read_jsonl(file)


def test_jsonl_tail_reports_replaced_file(file: Path) -> None:
    tail = JsonlTail(file)
    assert tail.read_new() == (False, [])
    file.write_text('{"step": 1}\n{"step": 2}\n')
    assert tail.read_new() == (True, [{"step": 1}, {"step": 2}])
    assert tail.read_new() == (False, [])
    aside = file.with_suffix(".partial")
    aside.write_text('{"step": 1}\n')
    aside.replace(file)
    assert tail.read_new() == (True, [{"step": 1}])


def test_jsonl_tail_reports_truncated_file(file: Path) -> None:
    tail = JsonlTail(file)
    file.write_text('{"step": 1}\n{"step": 2}\n')
    tail.read_new()
    file.write_text('{"step": 1}\n')
    assert tail.read_new() == (True, [{"step": 1}])


def test_jsonl_tail_reports_removed_file_once(file: Path) -> None:
    tail = JsonlTail(file)
    file.write_text('{"step": 1}\n')
    tail.read_new()
    file.unlink()
    assert tail.read_new() == (True, [])
    assert tail.read_new() == (False, [])


@pytest.mark.parametrize("content", [b"", b"a", b"a\n", b"a\nb", b"\n", b"a\n\nbc\n", b"ab\ncdefghij\nk\nlm"])
@pytest.mark.parametrize("block_bytes", [1, 2, 3, 100])
def test_lines_from_end_are_the_complete_lines_reversed(content: bytes, block_bytes: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    assert [*lines_from_end(tmp_path / "file", block_bytes)] == content.split(b"\n")[-2::-1]
