"""The coordinates of a rank, in words."""

from __future__ import annotations

import pytest

from phalanx.debug.hang_evidence import format_coordinates
from phalanx.spec.parallel_dims import ParallelDims


@pytest.mark.parametrize(
    ("sizes", "rank", "expected"),
    [
        (ParallelDims(), 0, ""),
        (ParallelDims(dp_shard=2, pp=4, tp=8), 21, "pp=2, tp=5, dp=0"),
        (ParallelDims(dp_replicate=2, dp_shard=2), 3, "dp_replicate=1, dp_shard=1"),
        (ParallelDims(dp_shard=4, tp=2, ep=4), 6, "tp=0, ep=2, dp=3"),
        (ParallelDims(dp_replicate=2, servers=1), 0, "server 0"),
        (ParallelDims(dp_replicate=2, servers=1), 2, "dp=1"),
    ],
)
def test_format_coordinates_matches_layout(sizes: ParallelDims, rank: int, expected: str) -> None:
    assert format_coordinates(sizes, rank) == expected
