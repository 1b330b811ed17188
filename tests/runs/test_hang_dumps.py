"""Files of hang dumps and failures: damaged files, and those of ranks that were removed."""

from __future__ import annotations

import json
from typing import Any

from phalanx.runs.hang_dumps import (
    dump_file,
    failure_file,
    read_dumps,
    read_failures,
    remove_dumps,
    remove_dumps_from_rank,
    write_dump,
    write_failure,
)
from phalanx.spec.parallel_dims import ParallelDims
from tests.helpers.hang_dumps import BUSY, make_dump


def test_read_dumps_skips_damaged_files(tmp_path: Any) -> None:
    sizes = ParallelDims(dp_shard=2)
    dump = make_dump(1, sizes, [], BUSY)
    write_dump(tmp_path, dump)
    (tmp_path / "hangs" / "rank-00000.json").write_text('{"format": 1, "ra')
    (tmp_path / "hangs" / "rank-00002.json").write_text("[]")
    (tmp_path / "hangs" / "rank-00003.json").write_text('{"format": 1, "rank": 3}')
    assert json.loads(json.dumps(read_dumps(tmp_path))) == {"1": json.loads(json.dumps(dump))}


def test_remove_dumps_deletes_dumps_and_keeps_failures_apart(tmp_path: Any) -> None:
    for rank in range(4):
        write_dump(tmp_path, make_dump(rank, ParallelDims(dp_shard=4), [], BUSY))
        write_failure(tmp_path, {"rank": rank, "reason": "it was late", "time": 1.0})
    remove_dumps(tmp_path, 1)
    assert list(read_dumps(tmp_path)) == list(read_failures(tmp_path)) == [0, 2, 3]
    remove_dumps_from_rank(tmp_path, 3)
    assert list(read_dumps(tmp_path)) == list(read_failures(tmp_path)) == [0, 2]
    remove_dumps(tmp_path, 7)
    assert {path.name for path in dump_file(tmp_path, 0).parent.iterdir()} == {"rank-00000.json", "rank-00002.json"}
    kept = {path.name.split("-2")[0] for path in (failure_file(tmp_path, 0).parent / "earlier").iterdir()}
    assert kept == {"rank-00001", "rank-00003"}
