"""Files with data are selected by their names, without those that describe them."""

from __future__ import annotations

import json

import pytest

from phalanx.data.folder_listing import select_data_files
from phalanx.spec.errors import UserError

INDEX = {"shards": [{"format": "mds", "raw_data": {"basename": name}} for name in ("0.mds", "1.mds")]}


@pytest.mark.parametrize(
    ("names", "selected"),
    [
        ("b a/b a/.c .git/x __pycache__/x.pyc a/site-packages/x.py", "b a/b"),
        ("p.idx p.bin p.meta.json p.bad_records.jsonl p.parts.json q.meta.json", "p.bin p.idx q.meta.json"),
        ("d/state.json d/dataset_info.json d/x.arrow dataset_dict.json e/state", "d/x.arrow e/state"),
        ("index.json 0.mds 0.mds.zstd 1.mds 2.mds", "0.mds 1.mds"),
        ("0.mds 0.mds.zstd 1.mds.zstd", "0.mds 1.mds.zstd"),
    ],
)
def test_selection_leaves_out_hidden_files_and_metadata(names: str, selected: str) -> None:
    index = json.dumps(INDEX).encode()
    assert select_data_files(names.split(), "root", lambda _: index, "data.train") == selected.split()


def test_index_without_shards_is_data() -> None:
    assert select_data_files(["index.json"], "root", lambda _: b"{}", "data.train") == ["index.json"]


@pytest.mark.parametrize("names", [["0.mds", "index.json"], ["index.json"]])
def test_missing_shard_of_an_index_is_an_error(names: list[str]) -> None:
    with pytest.raises(UserError, match=r"data.train = 's3://b/f/index.json' lists [01]\.mds, which does not exist"):
        select_data_files(names, "s3://b/f", lambda _: json.dumps(INDEX).encode(), "data.train")
