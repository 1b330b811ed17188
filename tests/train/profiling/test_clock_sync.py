"""Clock offsets between ranks, one of which has a time namespace with a clock that is far ahead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CLOCK_OFFSET_SECONDS = 1000
RANK_PROGRAM = """
import sys, time, torch, torch.distributed as dist
from datetime import timedelta
from phalanx.train.profiling.clock_sync import measure_clock_offset
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 3)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=60))
offset = measure_clock_offset(torch.device("cpu"), 60)
values = torch.tensor([offset.seconds, offset.error_seconds, time.perf_counter()], dtype=torch.float64)
print(*values.tolist())
dist.destroy_process_group()
"""


def start_rank(rank: int, directory: Path, *prefix: str) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-c", RANK_PROGRAM, str(rank), str(directory / "store")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True)


@pytest.fixture
def time_namespace_prefix() -> list[str]:
    """Provide the prefix of a command that gives it a clock of its own."""
    prefix = ["unshare", "--time", "--monotonic", str(CLOCK_OFFSET_SECONDS), "--fork"]
    try:
        is_permitted = subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        is_permitted = False
    if not is_permitted:
        pytest.skip("this process may not make a time namespace")
    return prefix


def test_measure_clock_offset_matches_offset_of_time_namespace(
    tmp_path: Path, time_namespace_prefix: list[str]
) -> None:
    ranks = [start_rank(0, tmp_path), start_rank(1, tmp_path, *time_namespace_prefix), start_rank(2, tmp_path)]
    outputs = [[float(word) for word in rank.communicate(timeout=120)[0].split()] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    offsets, errors, times = zip(*outputs, strict=True)
    assert times[1] - times[0] > CLOCK_OFFSET_SECONDS / 2  # it really had another clock
    assert offsets[0] == offsets[2] == errors[0] == errors[2] == 0
    assert 0 < errors[1] < 5
    assert abs(offsets[1] + CLOCK_OFFSET_SECONDS) <= errors[1]
