"""Every kind of source, in a fixed order, and errors of sources that cannot be read."""

import bz2
import errno
import gzip
import json
import lzma
import os
import shutil
import sys

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data import sources
from phalanx.data.places import StoredObject
from phalanx.data.record_formats import TextFormat
from phalanx.data.sources import Document, documents, is_held_out, list_source_files, read_documents
from phalanx.spec.errors import UserError


def document_names(names, **options):
    return [document.name for document in documents([str(name) for name in names], **options)]


def write_jsonl(path, rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def test_data_sources_directory_is_sorted_and_skips_hidden_and_binary_files(corpus):
    names = document_names([corpus])
    assert len(names) == 40
    assert names == sorted(names)
    assert names[0] == "part0/file00.py"


def test_data_sources_log_how_many_files_of_a_directory_are_read(tmp_path, capsys):
    for name, content in {"a.txt": b"a", "b.md": b"b", "c.bin": b"\0", "d.txt": b""}.items():
        (tmp_path / name).write_bytes(content)
    list(documents([str(tmp_path / "a.txt")]))
    next(documents([str(tmp_path)]))  # only checks the beginning
    assert capsys.readouterr().err == ""
    list(documents([str(tmp_path)], field="data.held_out"))
    assert capsys.readouterr().err == "phalanx: data.held_out: 2 files read, 2 skipped (binary or empty)\n"


def test_data_sources_sort_folders_by_name(tmp_path):
    for name in "3140592687":
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "a.txt").write_text("text")
    assert document_names([tmp_path]) == [f"{name}/a.txt" for name in "0123456789"]


def test_data_sources_preserve_given_order_of_files_and_sort_globs(corpus):
    first, second = corpus / "part1" / "file01.py", corpus / "part0" / "file00.py"
    assert document_names([first, second]) == ["file01.py", "file00.py"]
    assert len(document_names([corpus / "*" / "file0*.py"])) == 10
    assert document_names([corpus / "**" / "*5.py"]) == [f"part1/file{n}5.py" for n in "0123"]


def test_data_sources_document_name_is_independent_of_path_spelling_and_location(corpus, tmp_path, monkeypatch):
    write_jsonl(corpus / "rows.jsonl", [{"text": "one"}])
    names = ["part0", "part1/*.py", "rows.jsonl", "part1/file01.py"]
    monkeypatch.chdir(corpus)
    expected = document_names(names)
    assert document_names([f"./{source}" for source in names]) == expected
    assert document_names([f"part0/../{source}" for source in names]) == expected
    assert document_names([corpus / source for source in names]) == expected
    shutil.copytree(corpus, tmp_path / "moved")
    (tmp_path / "link").symlink_to(corpus / "part0")
    (tmp_path / "rows.jsonl").symlink_to(corpus / "rows.jsonl")
    monkeypatch.chdir(tmp_path)
    assert document_names([f"moved/{source}" for source in names]) == expected
    # `..` of a linked folder is the parent of its target.
    linked_sources = ["link", "link/../part1/*.py", "rows.jsonl", "link/../part1/file01.py"]
    assert document_names(linked_sources) == expected


def test_data_sources_name_linked_file_by_its_own_name(tmp_path):
    (tmp_path / "blob").mkdir()
    write_jsonl(tmp_path / "blob" / "5d41402abc", [{"text": "one"}])  # as caches such as DVC's name it
    (tmp_path / "train.jsonl").symlink_to("blob/5d41402abc")
    assert document_names([tmp_path / "train.jsonl"]) == document_names([tmp_path / "*.jsonl"]) == ["train.jsonl:1"]


def test_data_sources_decode_utf8_with_or_without_bom_and_latin1(tmp_path):
    for name, raw in (("a", "é\r\n".encode()), ("b", b"\xef\xbb\xbf\xc3\xa9"), ("c", b"caf\xe9")):
        (tmp_path / name).write_bytes(raw)
    assert [document.text for document in documents([str(tmp_path)])] == ["é\r\n", "é", "café"]


def test_data_sources_read_jsonl_records(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "one", "id": 1}, "\n", {"text": ""}, {"text": "fö\nur"}])
    assert list(documents([str(path)])) == [Document("a.jsonl:1", "one"), Document("a.jsonl:4", "fö\nur")]
    assert len(list(read_documents(list_source_files([str(path)])[0]))) == 3  # the empty one keeps its number


def test_data_sources_read_parquet_column(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": ["one", "", "two"] * 1000, "n": range(3000)}), path)
    result = list(documents([str(path)], TextFormat("body")))
    assert len(result) == 2000
    assert result[-1] == Document("a.parquet:3000", "two")


RECORDS = [{"text": "one", "id": 1}, {"text": ""}, {"text": "fö\nur"}]
JSON_LINES = "\n".join(map(json.dumps, RECORDS)).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param("a.json", JSON_LINES, id="json_lines"),
        pytest.param("a.ndjson", JSON_LINES, id="ndjson"),
        pytest.param("a.jsonlines", JSON_LINES, id="jsonlines"),
        pytest.param("a.JSONL", JSON_LINES, id="upper_case"),
        pytest.param("a.JSONL.GZ", gzip.compress(JSON_LINES), id="upper_case_gz"),
        pytest.param("a.json", json.dumps(RECORDS).encode(), id="array"),
        pytest.param("a.json", json.dumps(RECORDS, indent=1).encode(), id="indented_array"),
        pytest.param("a.json", b"\xef\xbb\xbf" + JSON_LINES, id="byte_order_mark"),
        pytest.param("a.jsonl.gz", gzip.compress(JSON_LINES), id="gz"),
        pytest.param("a.json.gz", gzip.compress(json.dumps(RECORDS).encode()), id="array_gz"),
        pytest.param("a.jsonl.bz2", bz2.compress(JSON_LINES), id="bz2"),
        pytest.param("a.jsonl.xz", lzma.compress(JSON_LINES), id="xz"),
        pytest.param("a.jsonl.zst", pyarrow.compress(JSON_LINES, "zstd", asbytes=True), id="zst"),
        pytest.param("part-00000", JSON_LINES, id="no_suffix"),
        pytest.param("part-00000.gz", gzip.compress(JSON_LINES), id="no_suffix_gz"),
        pytest.param("texts.dump", b"\xef\xbb\xbf" + JSON_LINES, id="unknown_suffix"),
        pytest.param("texts.txt", json.dumps(RECORDS, indent=1).encode(), id="array_with_unknown_suffix"),
        pytest.param("a.jsonl", gzip.compress(JSON_LINES[:40]) + gzip.compress(JSON_LINES[40:]), id="two_members"),
    ],
)
@pytest.mark.parametrize("in_folder", [False, True])
def test_data_sources_recognize_json_records_and_compression(tmp_path, name, content, in_folder):
    (tmp_path / name).write_bytes(content)
    result = list(documents([str(tmp_path if in_folder else tmp_path / name)]))
    assert result == [Document(f"{name}:1", "one"), Document(f"{name}:3", "fö\nur")]


def test_data_sources_read_compressed_text(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"caf\xe9"))
    (tmp_path / "b.bin.gz").write_bytes(gzip.compress(b"\0" * 100))
    assert list(documents([str(tmp_path)])) == [Document("a.txt.gz", "café", is_utf8=False)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.py", '{"text": "one"}\n{"text": "two"}\n'),
        ("rows.js.gz", '[{"text": "one"}]\n'),
        ("main.c", '{\n"text"\n}'),
        ("main.hs", "{-# LANGUAGE GADTs #-}\nmodule Main where"),
        ("page.tex", '{"text": "one"}\n\\end{document}'),
        ("setup.cfg", "[text]\na = 1\n"),
        ("empty.log", "{}\n"),
    ],
)
@pytest.mark.parametrize("in_folder", [False, True])
def test_data_sources_never_take_code_for_json_records(tmp_path, name, content, in_folder):
    (tmp_path / name).write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    result = list(documents([str(tmp_path if in_folder else tmp_path / name)]))
    assert result == [Document(name, content)]


def test_data_sources_read_other_json_lines_of_unknown_suffix_as_text_only_in_folder(tmp_path):
    content = '{"level": "info"}\n{"level": "error"}\n'
    (tmp_path / "server.log").write_text(content)
    assert list(documents([str(tmp_path)])) == [Document("server.log", content)]
    with pytest.raises(UserError, match=r"is not a field of .*server.log:1"):
        list(documents([str(tmp_path / "server.log")]))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('# my data\n{"text": "one"}\n{"text": "two"}\n', 1),
        ('{"text": "one"}\n{"text": "two"}\n{"broken\n', 3),
        ('{"text": "one"}\n{"text": "two"}\nprose\n', 3),
    ],
)
def test_data_sources_name_line_between_json_records_of_unknown_suffix(tmp_path, content, line):
    (tmp_path / "rows.dat").write_text(content)
    with pytest.raises(UserError, match=rf"rows.dat:{line}.*is not valid JSON"):
        list(documents([str(tmp_path / "rows.dat")]))
    (tmp_path / "prose.txt").write_text('A line of prose.\n{"text": "quoted"}\nAnother.\n')
    assert len(list(documents([str(tmp_path / "prose.txt")]))) == 1


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("in_folder", [False, True])
def test_data_sources_read_single_json_record_with_text(tmp_path, indent, in_folder):
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"text": "one"}, indent=indent))
    assert list(documents([str(tmp_path if in_folder else file)])) == [Document("a.json:1", "one")]


@pytest.mark.parametrize(
    "content",
    [
        '{"name": 1}',
        '{\n "name": {"text": 1}\n}',
        '{"text": {"color": "red"}}',
        "[1, 2]",
        "[]",
        "[{ broken",
        '[{"file": "a.c", "command": "cc -c a.c"}]',
        '[\n {"file": "a.c"},\n {"file": "b.c"}\n]',
        '{"file": "a.c"}\n{"file": "b.c"}',
    ],
)
def test_data_sources_read_other_json_of_folder_as_text(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    assert list(documents([str(tmp_path)])) == [Document("a.json", content)]
    with pytest.raises(UserError):
        list(documents([str(tmp_path / "a.json")]))


@pytest.mark.parametrize("rows", [[{"text": None}, {"text": "one"}], [{"text": "one"}, {"body": "two"}]])
@pytest.mark.parametrize("form", ["lines", "array"])
def test_data_sources_reject_faulty_record_of_folder(tmp_path, rows, form):
    (tmp_path / "a.json").write_text("\n".join(map(json.dumps, rows)) if form == "lines" else json.dumps(rows))
    with pytest.raises(UserError, match=r"data\.text_key"):
        list(documents([str(tmp_path)]))


def test_data_sources_skip_metadata_of_indexed_pairs(tmp_path):
    for name in ("pair.meta.json", "other.meta.json"):
        (tmp_path / name).write_text('{"a": 1}')
    (tmp_path / "pair.idx").write_bytes(b"\0")
    assert document_names([tmp_path]) == ["other.meta.json"]


def test_data_sources_leave_out_metadata_in_store_as_in_directory(tmp_path, monkeypatch):
    names = [
        "b.txt",
        "a/c.txt",
        "a/index.json",
        "a/s.mds",
        "a/s.mds.zstd",
        "__pycache__/x.py",
        "hf/state.json",
        "hf/x.arrow",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    url = "s3://bucket/folder"
    objects = [StoredObject(url=f"{url}/{name}", name=name, size=2, version="") for name in sorted(names)]
    monkeypatch.setattr(sources, "list_objects", lambda source, field: objects)
    monkeypatch.setattr(sources, "read_object", lambda url: b"{}")
    for source in (str(tmp_path), url, f"{url}/"):
        read = [source_file.name for source_file in list_source_files([source])]
        assert read == ["b.txt", "a/c.txt", "a/s.mds", "hf/x.arrow"]


def test_stdlib_source_equals_standard_library_files():
    files = list_source_files(["stdlib"])
    library = {part.name for part in files}
    assert {"os.py", os.path.join("json", "decoder.py")} <= library
    assert not any("site-packages" in name or not name.endswith(".py") for name in library)
    (source,) = read_documents(next(part for part in files if part.name == "os.py"))
    with open(os.__file__, encoding="utf-8", newline="") as file:
        assert source.text == file.read()


@pytest.mark.parametrize(
    ("source", "package"), [("hf:org/set", "datasets"), ("a.parquet", "pyarrow"), ("a.zst", "pyarrow")]
)
def test_data_sources_report_missing_optional_package(tmp_path, monkeypatch, source, package):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "a.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [MissingPackageFinder(package), *sys.meta_path])
    with pytest.raises(UserError, match=f"requires {package}, which is not installed") as caught:
        list(documents([source]))
    assert caught.value.fix == "in a clone of Phalanx, pip install '.[data]'"


class MissingPackageFinder:
    """An import finder that hides a package."""

    def __init__(self, package):
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == self.package:
            raise ModuleNotFoundError(name)


@pytest.mark.parametrize(
    ("source", "content", "field", "message"),
    [
        ("missing.txt", None, "data.train", "does not exist"),
        ("*.text", None, "data.train", "matches no file"),
        ("empty.txt", b"", "data.train", "has no text"),
        ("binary.txt", b"a\0b", "data.train", "is not text: it contains zero bytes"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": \n', "data.train", r"bad.jsonl:2'?:? is not valid JSON"),
        ("deep.jsonl", b'{"text": "a"}\n' + b"[" * 100_000, "data.train", r"deep.jsonl:2'?:? is not valid JSON"),
        ("list.jsonl", b"[1]\n", "data.text_key", r"is a field of JSON objects, and .*list.jsonl:1 is none"),
        ("key.jsonl", b'{"content": "a"}\n', "data.text_key", r"is not a field of .*key.jsonl:1"),
        ("type.jsonl", b'{"text": 5}\n', "data.text_key", r"type.jsonl:1 has type int"),
        ("null.jsonl", b'{"text": null}\n', "data.text_key", r"null.jsonl:1 has type NoneType"),
        ("utf8.jsonl", b'{"text": "\xff"}\n', "data.train", r"utf8.jsonl:1'?:? is not valid JSON"),
        ("key.json", b'[{"content": "a"}]', "data.text_key", r"is not a field of .*key.json:1"),
        ("key2.json", b'{"content": "a"}', "data.text_key", r"is not a field of .*key2.json:1"),
        ("cut.json", b'[{"text": "a"}, {"te', "data.train", "is not valid JSON"),
        (
            "part-00000",
            b'{"text": "a"}\n{"text": "b"}\n{"text": \n',
            "data.train",
            r"part-00000:3'?:? is not valid JSON",
        ),
        ("cut.txt.gz", gzip.compress(b"text", mtime=0)[:-9], "data.train", "cannot be read: Compressed file ended"),
        ("bad.gz", b"\x1f\x8b12345678901234567890", "data.train", "cannot be read"),
        ("cut.zst", b"\x28\xb5\x2f\xfd12", "data.train", "cannot be read"),
        ("tar.gz", gzip.compress(b"a\0b", mtime=0), "data.train", "is not text: it contains zero bytes"),
        ("bad.parquet", b"not parquet", "data.train", "is not a valid Parquet file"),
        ("bad.arrow", b"not arrow", "data.train", "is not an Arrow file"),
    ],
)
def test_data_sources_reject_invalid_files(tmp_path, source, content, field, message):
    if content is not None:
        (tmp_path / source).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        list(documents([str(tmp_path / source)]))
    assert caught.value.field == field
    assert caught.value.fix


CORRECT_RECORD = "correct or remove this record"
SKIP_RECORDS = "or skip broken records with data.max_bad_records"
RENDER_CONVERSATIONS = 'set data.format = "chat" for conversations'


@pytest.mark.parametrize(
    ("rows", "text_key", "fix"),
    [
        ([{"id": 1, "body": "a", "title": "b"}], "text", "use one of its text fields: 'body', 'title'"),
        ([{"text": 5, "body": "a"}], "text", "use one of its text fields: 'body'"),
        ([{"id": 1}], "text", "add a text field 'text' to each record"),
        ([{"text": 5}], "text", CORRECT_RECORD),
        ([{"text": "a"}, {"text": 5}], "text", f"{CORRECT_RECORD}; {SKIP_RECORDS}"),
        ([{"text": "a"}, {"body": "b"}], "text", f"{CORRECT_RECORD}; {SKIP_RECORDS}"),
        ([{"messages": [{"role": "user", "content": "a"}]}], "text", RENDER_CONVERSATIONS),
        ([{"id": "1", "messages": [{"role": "user", "content": "a"}]}], "messages", RENDER_CONVERSATIONS),
    ],
)
def test_data_sources_fix_of_record_without_text(tmp_path, rows, text_key, fix):
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError) as caught:
        list(documents([str(path)], TextFormat(text_key)))
    assert caught.value.fix == fix


def test_data_sources_invalid_json_line_has_one_line_number(tmp_path):
    path = write_jsonl(tmp_path / "bad.jsonl", ["{'text': 1}\n"])
    with pytest.raises(UserError) as caught:
        list(documents([str(path)]))
    assert caught.value.value == f"{path}:1"
    assert caught.value.problem == "is not valid JSON: Expecting property name enclosed in double quotes"


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_data_sources_read_arrow_column(tmp_path, kind):
    table = pyarrow.table({"text": ["one", "", "two"] * 1000, "n": range(3000)})
    path = tmp_path / "a.arrow"
    new = {"stream": pyarrow.ipc.new_stream, "file": pyarrow.ipc.new_file}[kind]
    with new(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=700)
    result = list(documents([str(path)]))
    assert len(result) == 2000
    assert result[-1] == Document("a.arrow:3000", "two")
    with pytest.raises(UserError, match=r"data\.text_key = 'body'") as caught:
        list(documents([str(path)], TextFormat("body")))
    assert caught.value.fix == "use one of its text fields: 'text'"


@pytest.mark.parametrize(
    ("columns", "fix"),
    [
        ({"body": ["one"], "id": [1]}, "use one of its text fields: 'body'"),
        ({"body": ["one"], "text": [1]}, "use one of its text fields: 'body'"),
        ({"id": [1]}, "add a text field 'text' to each record"),
        ({"messages": [[{"role": "user"}]]}, RENDER_CONVERSATIONS),
    ],
)
def test_parquet_source_error_lists_text_columns(tmp_path, columns, fix):
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"data\.text_key = 'text'") as caught:
        list(documents([str(tmp_path / "a.parquet")]))
    assert caught.value.fix == fix


def test_data_sources_reject_empty_list_and_empty_directory(tmp_path):
    with pytest.raises(UserError, match="is empty"):
        list(documents([]))
    with pytest.raises(UserError, match="is a directory without a readable file") as caught:
        list(documents([str(tmp_path)], field="data.held_out"))
    assert caught.value.field == "data.held_out"


def test_data_sources_report_file_without_read_permission(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")

    def refuse(path, field):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(sources, "open_decompressed", refuse)  # root, which tests may run as, may read everything
    with pytest.raises(UserError, match="cannot be read: Permission denied"):
        list(documents([str(tmp_path / "a.txt")]))


def test_read_documents_reports_file_deleted_after_listing(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (part,) = list_source_files([str(tmp_path)])
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UserError, match="cannot be read: No such file"):
        list(read_documents(part))


def test_is_held_out_choice_is_stable_for_fixed_names():
    names = ("os.py", "re.py", "ast.py", "json/decoder.py", "a.jsonl:7")
    assert [name for name in names if is_held_out(name, 0.3)] == ["os.py", "json/decoder.py"]


@given(name=st.text(), low=st.floats(0, 1), high=st.floats(0, 1))
def test_is_held_out_set_grows_with_fraction(name, low, high):
    low, high = sorted((low, high))
    assert is_held_out(name, high) or not is_held_out(name, low)
    assert not is_held_out(name, 0.0)
    assert is_held_out(name, 1.0)


def test_is_held_out_selects_about_the_requested_fraction():
    assert sum(is_held_out(f"file{i}", 0.05) for i in range(20_000)) == pytest.approx(1000, rel=0.1)
