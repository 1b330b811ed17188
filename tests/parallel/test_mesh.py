"""The arithmetic of layouts: the degrees of every axis, and which share of the data a rank reads."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.parallel.mesh import Mesh
from phalanx.spec.errors import UserError
from phalanx.spec.layout import Degrees, Layout, degrees

# A layout, the ranks, the degrees (dp_replicate, dp_shard, pp, cp, tp), and the share of the data of each rank.
TABLE: list[tuple[dict[str, Any], int, tuple[int, int, int, int, int], list[int]]] = [
    ({}, 1, (1, 1, 1, 1, 1), [0]),
    ({}, 4, (4, 1, 1, 1, 1), [0, 1, 2, 3]),
    ({"data": "parameter_server"}, 3, (2, 1, 1, 1, 1, 1), [1, 0, 1]),
    ({"data": "zero1"}, 2, (1, 2, 1, 1, 1), [0, 1]),
    ({"data": "zero3"}, 4, (1, 4, 1, 1, 1), [0, 1, 2, 3]),
    ({"data": "hsdp", "dp_shard": 2}, 4, (2, 2, 1, 1, 1), [0, 1, 2, 3]),
    ({"data": "hsdp", "dp_shard": 1}, 4, (4, 1, 1, 1, 1), [0, 1, 2, 3]),
    ({"data": "hsdp", "dp_shard": 4}, 4, (1, 4, 1, 1, 1), [0, 1, 2, 3]),
    ({"tp": 2}, 4, (2, 1, 1, 1, 2), [0, 0, 1, 1]),
    ({"cp": 2, "data": "zero3"}, 4, (1, 2, 1, 2, 1), [0, 0, 1, 1]),
    ({"pp": 2}, 4, (2, 1, 2, 1, 1), [0, 0, 1, 1]),
    ({"pp": 2, "tp": 2}, 8, (2, 1, 2, 1, 2), [0, 0, 0, 0, 1, 1, 1, 1]),
    ({"pp": 2, "cp": 2, "tp": 2}, 8, (1, 1, 2, 2, 2), [0] * 8),
    ({"data": "hsdp", "dp_shard": 2, "tp": 2}, 8, (2, 2, 1, 1, 2), [0, 0, 1, 1, 2, 2, 3, 3]),
]


@pytest.mark.parametrize(("layout", "world_size", "expected", "shares"), TABLE)
def test_degrees_and_data_ranks(layout: Any, world_size: int, expected: Any, shares: list[int]) -> None:
    made = degrees(Layout(**layout), world_size)
    assert made == Degrees(*expected)
    assert made.world_size == world_size
    assert [Mesh(made, rank, None).dp_rank for rank in range(world_size)] == shares
    assert set(shares) == set(range(made.dp))


@pytest.mark.parametrize(
    ("layout", "world_size", "field"),
    [
        ({"tp": 3}, 4, "parallel.tp"),
        ({"pp": 2, "cp": 2, "tp": 2}, 4, "parallel.pp x cp x tp"),
        ({"dp_shard": 2}, 4, "parallel.dp_shard"),
        ({"data": "hsdp"}, 4, "parallel.dp_shard"),
        ({"data": "hsdp", "dp_shard": 3}, 4, "parallel.dp_shard"),
        ({"data": "hsdp", "dp_shard": 4, "tp": 2}, 4, "parallel.dp_shard"),
    ],
)
def test_ranks_that_cannot_be_divided_so(layout: Any, world_size: int, field: str) -> None:
    with pytest.raises(UserError) as caught:
        degrees(Layout(**layout), world_size)
    assert caught.value.field == field
    assert caught.value.fix


def test_one_rank_has_no_mesh() -> None:
    mesh = Mesh(degrees(Layout(), 1), 0, None)
    assert mesh.axes("dp_replicate", "tp") is None
    assert mesh.dp_group is None
