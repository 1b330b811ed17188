"""The .bin/.idx pair, compared with an independent reader and writer of Megatron's documented format."""

from __future__ import annotations

import json
import struct
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.indexed_dataset import (
    IndexedDataset,
    IndexedWriter,
    join_pairs,
    prefix_of,
    split_tail,
    token_dtype,
)
from phalanx.spec.errors import UserError

DOCUMENTS = [[5, 6, 7], [], [65_499], [1] * 1000, [2, 3]]
DTYPE_CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}


def read_megatron(prefix: Path) -> tuple[int, list[list[int]]]:
    """Return the dtype code and the documents of a pair, read with struct by the format's description."""
    index, tokens = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, entries = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1
    assert len(index) == 34 + 12 * sequences + 8 * entries
    lengths = struct.unpack_from(f"<{sequences}i", index, 34)
    pointers = struct.unpack_from(f"<{sequences}q", index, 34 + 4 * sequences)
    documents = struct.unpack_from(f"<{entries}q", index, 34 + 12 * sequences)
    kind = DTYPE_CODES[code]
    read = [list(struct.unpack_from(f"<{n}{kind}", tokens, at)) for n, at in zip(lengths, pointers, strict=True)]
    return code, [list(chain(*read[first:last])) for first, last in pairwise(documents)]


def write_megatron(prefix: Path, documents: list[list[list[int]]], code: int) -> None:
    """Write a pair whose documents may have several sequences, as Megatron does."""
    kind, size = DTYPE_CODES[code], struct.calcsize(DTYPE_CODES[code])
    sequences = [ids for document in documents for ids in document]
    lengths = [len(ids) for ids in sequences]
    pointers = [size * sum(lengths[:i]) for i in range(len(lengths))]
    starts = [0]
    for document in documents:
        starts.append(starts[-1] + len(document))
    Path(f"{prefix}.bin").write_bytes(b"".join(struct.pack(f"<{len(ids)}{kind}", *ids) for ids in sequences))
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(sequences), len(starts))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(pointers)}q", *pointers)
        + struct.pack(f"<{len(starts)}q", *starts)
    )


def write_pair(prefix: Path, documents: list[list[int]], dtype: type = np.uint16) -> None:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for ids in documents:
            writer.add(np.array(ids, np.int64))


@pytest.mark.parametrize(("dtype", "code"), [(np.uint16, 8), (np.int32, 4)])
def test_indexed_writer_output_is_readable_as_megatron_format(tmp_path: Path, dtype: type, code: int) -> None:
    write_pair(tmp_path / "pair", DOCUMENTS, dtype)
    assert read_megatron(tmp_path / "pair") == (code, DOCUMENTS)


@pytest.mark.parametrize("code", DTYPE_CODES)
def test_indexed_dataset_reads_megatron_files(tmp_path: Path, code: int) -> None:
    documents = [[[5, 6], [7]], [[9]], [], [[], [100, 101], [102, 103, 104]]]
    write_megatron(tmp_path / "pair", documents, code)
    dataset = IndexedDataset(tmp_path / "pair")
    flat = [list(chain(*document)) for document in documents]
    assert [dataset.document(i).tolist() for i in range(len(dataset))] == flat
    assert dataset.tokens.tolist() == list(chain(*flat))
    assert dataset.offsets.tolist() == [0, 3, 4, 4, 9]
    assert dataset.offsets.dtype == np.int64
    assert dataset.size == 9


@settings(max_examples=30, deadline=None)
@given(documents=st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=20), max_size=12))
def test_indexed_dataset_round_trips_documents(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]
) -> None:
    prefix = tmp_path_factory.mktemp("pair") / "pair"
    write_pair(prefix, documents)
    dataset = IndexedDataset(prefix)
    assert [dataset.document(i).tolist() for i in range(len(dataset))] == documents


def test_token_dtype_equals_megatron_choice() -> None:
    assert [token_dtype(vocab) for vocab in (257, 65_499, 65_500, 200_000)] == [
        np.dtype(kind) for kind in (np.uint16, np.uint16, np.int32, np.int32)
    ]


@pytest.mark.parametrize("ids", [[65_536], [-1]])
def test_indexed_writer_rejects_out_of_range_ids_and_leaves_no_files(tmp_path: Path, ids: list[int]) -> None:
    with pytest.raises(ValueError, match="do not fit uint16"):
        write_pair(tmp_path / "pair", [[1, 2], ids])
    assert list(tmp_path.iterdir()) == []


def test_indexed_writer_failure_leaves_existing_pair_unchanged(tmp_path: Path) -> None:
    write_pair(tmp_path / "pair", DOCUMENTS)
    with pytest.raises(ValueError, match="do not fit"):
        write_pair(tmp_path / "pair", [[1], [-1]])
    assert read_megatron(tmp_path / "pair") == (8, DOCUMENTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pair.bin", "pair.idx"]


def test_indexed_writer_publishes_files_only_when_complete(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "pair", np.dtype(np.uint16)) as writer:
        writer.add(np.arange(10))
        assert not (tmp_path / "pair.bin").exists()
        assert not (tmp_path / "pair.idx").exists()


def corrupt_file(prefix: Path, suffix: str, change: object) -> None:
    path = Path(f"{prefix}{suffix}")
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        (".idx", lambda raw: b"TNTIDX\0\0\0" + raw[9:], "first bytes are not MMIDIDX"),
        (".idx", lambda raw: b"", "first bytes are not MMIDIDX"),
        (".idx", lambda raw: raw[:20], "truncated: it has 20 bytes"),
        (".idx", lambda raw: raw[:-1], r"truncated: it has 141 bytes, but 5 sequences need 142"),
        (".idx", lambda raw: raw[:9] + struct.pack("<Q", 2) + raw[17:], "version 2"),
        (".idx", lambda raw: raw[:17] + b"\x07" + raw[18:], "unknown token type 7"),
        (".idx", lambda raw: raw[:34] + struct.pack("<i", -3) + raw[38:], "not contiguous"),
        (".idx", lambda raw: raw[:54] + struct.pack("<q", 8) + raw[62:], "not contiguous"),
        (".idx", lambda raw: raw[:-8] + struct.pack("<q", 4), "document starts that do not increase"),
        (".idx", lambda raw: raw[:-16] + struct.pack("<q", 9) + raw[-8:], "document starts that do not increase"),
        (".bin", lambda raw: raw[:-1], r"truncated: it has 2,011 bytes, but its index needs 2,012"),
    ],
)
def test_indexed_dataset_rejects_corrupt_files(tmp_path: Path, suffix: str, change: object, message: str) -> None:
    write_pair(tmp_path / "pair", DOCUMENTS)
    corrupt_file(tmp_path / "pair", suffix, change)
    with pytest.raises(UserError, match=message) as caught:
        IndexedDataset(tmp_path / "pair", "data.held_out")
    assert caught.value.field == "data.held_out"
    assert caught.value.fix


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_indexed_dataset_reports_missing_file(tmp_path: Path, suffix: str) -> None:
    write_pair(tmp_path / "pair", DOCUMENTS)
    Path(f"{tmp_path / 'pair'}{suffix}").unlink()
    with pytest.raises(UserError, match=f"has no {suffix} file"):
        IndexedDataset(tmp_path / "pair")
    assert prefix_of(str(tmp_path / "pair")) == str(tmp_path / "pair")


def join_two_pairs(folder: Path) -> Path:
    for name in ("a", "b"):
        write_pair(folder / name, DOCUMENTS)
    join_pairs([IndexedDataset(folder / name) for name in ("a", "b")], folder / "joined")
    return folder / "joined"


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-3],
        lambda text: "",
        lambda text: "\xff",
        lambda text: "{}",
        lambda text: "[" * 100_000,
        lambda text: "[1, 2]",
        lambda text: text.replace('"size"', '"length"'),
        lambda text: text.replace("uint16", "tokens"),
        lambda text: text.replace('"first": 0', '"first": "0"'),
        lambda text: text.replace('"first": 0', '"first": -1'),
        lambda text: json.dumps(json.loads(text)[:1]),
    ],
)
def test_indexed_dataset_rejects_damaged_list_of_parts(tmp_path: Path, change: object) -> None:
    prefix = join_two_pairs(tmp_path)
    corrupt_file(prefix, ".parts.json", lambda raw: change(raw.decode()).encode("latin-1"))  # type: ignore[operator]
    with pytest.raises(UserError, match=r"joined\.parts\.json' is damaged") as caught:
        IndexedDataset(prefix, "data.held_out")
    assert caught.value.field == "data.held_out"
    assert caught.value.fix


def test_indexed_dataset_names_missing_part(tmp_path: Path) -> None:
    prefix = join_two_pairs(tmp_path)
    (tmp_path / "b.bin").unlink()
    with pytest.raises(UserError, match=r"joined' requires .*/b\.bin, which does not exist") as caught:
        IndexedDataset(prefix)
    assert "b.bin" in caught.value.fix


def test_prefix_of_accepts_path_with_and_without_suffix(tmp_path: Path) -> None:
    write_pair(tmp_path / "pair", DOCUMENTS)
    for name in ("pair", "pair.bin", "pair.idx"):
        assert prefix_of(str(tmp_path / name)) == str(tmp_path / "pair")
    assert prefix_of(str(tmp_path / "other")) is None


def test_indexed_dataset_fingerprint_depends_on_content_not_path(tmp_path: Path) -> None:
    fingerprints = []
    for name, documents in (
        ("a", [[1, 2, 3], [4]]),
        ("same", [[1, 2, 3], [4]]),
        ("token", [[1, 2, 3], [5]]),
        ("cut", [[1, 2], [3, 4]]),
    ):
        write_pair(tmp_path / name, documents)
        fingerprints.append(IndexedDataset(tmp_path / name).fingerprint())
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == 3


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=8), fraction=st.floats(0.01, 0.99))
def test_split_tail_divides_tokens_by_fraction(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], fraction: float
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    total = sum(lengths)
    flat = list(range(total))
    write_pair(folder / "all", [flat[sum(lengths[:i]) : sum(lengths[: i + 1])] for i in range(len(lengths))])
    dataset = IndexedDataset(folder / "all")
    if total < 2:
        with pytest.raises(UserError, match="too few tokens for a held-out part"):
            split_tail(dataset, fraction, folder / "head", folder / "tail")
        return
    split_tail(dataset, fraction, folder / "head", folder / "tail")
    head, tail = IndexedDataset(folder / "head"), IndexedDataset(folder / "tail")
    assert head.size + tail.size == total
    assert tail.size == min(max(1, round(total * fraction)), total - 1)
    parts = [part.document(i).tolist() for part in (head, tail) for i in range(len(part))]
    assert list(chain(*parts)) == flat
    # Only the document that the cut goes through is divided.
    documents = [dataset.document(i).tolist() for i in range(len(dataset))]
    assert len([part for part in parts if part and part not in documents]) in (0, 2)
