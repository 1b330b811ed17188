"""WebDataset shards: samples in order, text members only, nothing written to a disk."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest

from phalanx.data.bad_records import BadRecords
from phalanx.data.record_formats import TextFormat
from phalanx.data.sources import documents
from phalanx.spec.errors import UserError

MEMBERS = {
    "a/000.txt": b"zero",
    "a/000.jpg": b"\xff\xd8",
    "a/001.json": json.dumps({"text": "one", "id": 1}).encode(),
    "a/002.x.json": b"{}",
    "a/002.txt": b"two",
    "b/000.txt": "caf\u00e9".encode(),
}


def write_tar(path: Path, members: dict[str, bytes], extra: tarfile.TarInfo | None = None) -> Path:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(_folder("a"))
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        if extra is not None:
            archive.addfile(extra)
    content = buffer.getvalue()
    path.write_bytes(gzip.compress(content) if path.suffix in (".gz", ".tgz") else content)
    return path


def _folder(name: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = tarfile.DIRTYPE
    return info


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tgz"])
@pytest.mark.parametrize("in_folder", [False, True])
def test_samples_are_documents_in_order(tmp_path: Path, name: str, in_folder: bool) -> None:
    path = write_tar(tmp_path / name, MEMBERS)
    read = list(documents([str(tmp_path if in_folder else path)]))
    assert [document.text for document in read] == ["zero", "one", "two", "caf\u00e9"]
    assert [document.name for document in read] == [f"{name}:{number}" for number in range(1, 5)]


def test_text_key_is_an_extension_or_a_field_of_json(tmp_path: Path) -> None:
    members = {"0.md": b"member", "0.txt": b"other", "1.json": b'{"md": "field"}'}
    path = write_tar(tmp_path / "a.tar", members)
    assert [document.text for document in documents([str(path)], TextFormat("md"))] == ["member", "field"]


@pytest.mark.parametrize(
    ("members", "field", "message"),
    [
        ({"0.jpg": b"", "0.cls": b"1"}, "data.train", r"a.tar:1 \(0\)' has no text: its members are .jpg, .cls"),
        ({"0.json": b'{"caption": "a"}'}, "data.text_key", r"is not a field of .*a.tar:1"),
        ({"0.txt": b"\xff\xfe"}, "data.train", "has text that is not UTF-8"),
    ],
)
def test_samples_without_text_are_broken_records(
    tmp_path: Path, members: dict[str, bytes], field: str, message: str
) -> None:
    path = write_tar(tmp_path / "a.tar", {**members, "1.txt": b"fine"})
    with pytest.raises(UserError, match=message) as caught:
        list(documents([str(path)]))
    assert caught.value.field == field
    assert [document.text for document in documents([str(path)], bad_records=BadRecords(1))] == ["fine"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes) -> None:
    info = tarfile.TarInfo("9.txt")
    info.type = kind
    info.linkname = "/etc/passwd"
    path = write_tar(tmp_path / "a.tar", {"0.txt": b"fine"}, info)
    with pytest.raises(UserError, match=r"has the member 9\.txt, which is neither a file nor a folder"):
        list(documents([str(path)], bad_records=BadRecords(9)))


def test_members_are_not_written_to_their_paths(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"../outside.txt": b"text", "/tmp/absolute.txt": b"more"})
    before = sorted(tmp_path.parent.rglob("*"))
    assert len(list(documents([str(path)]))) == 2
    assert sorted(tmp_path.parent.rglob("*")) == before


def test_truncated_archive_is_one_broken_record(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"0.txt": b"zero", "1.txt": b"x" * 2000})
    path.write_bytes(path.read_bytes()[:3000])
    bad_records = BadRecords(1)
    assert [document.text for document in documents([str(path)], bad_records=bad_records)] == ["zero"]
    assert "is damaged: unexpected end of data" in bad_records.list[0].reason
