"""Degrees of all axes of a layout, the data that each rank reads, and the groups of a mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from phalanx.parallel.mesh import Mesh, build_mesh
from phalanx.spec.layout import Layout
from phalanx.spec.parallel_dims import ParallelDims, expert_parallel_groups, parallel_dims, process_groups
from phalanx.testing import rank_pool

# A layout, the ranks, the degrees (dp_replicate, dp_shard, pp, cp, tp, and more), and the data that each rank reads.
LAYOUT_CASES: list[tuple[dict[str, Any], int, tuple[int, ...], list[int]]] = [
    ({}, 1, (1, 1, 1, 1, 1), [0]),
    ({}, 4, (4, 1, 1, 1, 1), [0, 1, 2, 3]),
    ({"data_parallel": "parameter_server"}, 3, (2, 1, 1, 1, 1, 1), [1, 0, 1]),
    ({"data_parallel": "zero1"}, 2, (1, 2, 1, 1, 1), [0, 1]),
    ({"data_parallel": "zero3"}, 4, (1, 4, 1, 1, 1), [0, 1, 2, 3]),
    ({"data_parallel": "hsdp", "dp_shard": 2}, 4, (2, 2, 1, 1, 1), [0, 1, 2, 3]),
    ({"data_parallel": "hsdp", "dp_shard": 1}, 4, (4, 1, 1, 1, 1), [0, 1, 2, 3]),
    ({"data_parallel": "hsdp", "dp_shard": 4}, 4, (1, 4, 1, 1, 1), [0, 1, 2, 3]),
    ({"tp": 2}, 4, (2, 1, 1, 1, 2), [0, 0, 1, 1]),
    ({"cp": 2, "data_parallel": "zero3"}, 4, (1, 2, 1, 2, 1), [0, 0, 1, 1]),
    ({"pp": 2}, 4, (2, 1, 2, 1, 1), [0, 0, 1, 1]),
    ({"pp": 2, "tp": 2}, 8, (2, 1, 2, 1, 2), [0, 0, 0, 0, 1, 1, 1, 1]),
    ({"pp": 2, "cp": 2, "tp": 2}, 8, (1, 1, 2, 2, 2), [0] * 8),
    ({"pp": 2, "rank_order": "pipeline_outer"}, 4, (2, 1, 2, 1, 1, 0, 1, True), [0, 1, 0, 1]),
    ({"pp": 2, "tp": 2, "rank_order": "pipeline_outer"}, 8, (2, 1, 2, 1, 2, 0, 1, True), [0, 0, 1, 1, 0, 0, 1, 1]),
    ({"data_parallel": "hsdp", "dp_shard": 2, "tp": 2}, 8, (2, 2, 1, 1, 2), [0, 0, 1, 1, 2, 2, 3, 3]),
]


@pytest.mark.parametrize(("layout", "world_size", "expected", "dp_ranks"), LAYOUT_CASES)
def test_parallel_dims_assign_expected_sizes_and_dp_ranks(
    layout: Any, world_size: int, expected: Any, dp_ranks: list[int]
) -> None:
    dims = parallel_dims(Layout(**layout), world_size)
    assert dims == ParallelDims(**dict(zip(ParallelDims.__dataclass_fields__, expected, strict=False)))
    assert dims.world_size == world_size
    assert [
        Mesh(dims=dims, rank=rank, device_mesh=None, data_dims=dims.with_cp_as_data_parallel(Layout())).dp_rank
        for rank in range(world_size)
    ] == dp_ranks
    assert set(dp_ranks) == set(range(dims.dp_size))


def test_mesh_of_single_rank_has_no_process_groups() -> None:
    sizes = parallel_dims(Layout(), 1)
    mesh = Mesh(dims=sizes, rank=0, device_mesh=None, data_dims=sizes.with_cp_as_data_parallel(Layout()))
    assert mesh.submesh("dp_replicate", "tp") is None
    assert mesh.dp_group is None


def build_groups_by_axis(layout: Layout) -> dict[str, list[int]]:
    """Return the ranks of each of this rank's groups."""
    mesh = build_mesh(layout, dist.get_world_size(), "cpu")
    assert mesh.device_mesh is not None
    groups = {"dp": mesh.dp_group, "tp": mesh.tp_group, "same experts": mesh.expert_dp_group}
    groups |= {"pp": mesh.pipeline_groups[0]} if layout.pp > 1 else {}
    groups |= {"cp": mesh.cp_mesh.get_group()} if mesh.cp_mesh else {}
    groups |= {"ep": mesh.ep_mesh["ep"].get_group()} if mesh.ep_mesh else {}
    return {name: sorted(dist.get_process_group_ranks(group)) for name, group in groups.items() if group is not None}


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2, "tp": 2, "ep": 2},
        {"pp": 2, "cp": 2, "ep": 4, "data_parallel": "zero3"},
        {"pp": 2, "cp": 2, "ep": 2, "rank_order": "pipeline_outer"},
        {"pp": 2, "tp": 2, "ep": 4, "rank_order": "pipeline_outer", "data_parallel": "zero1"},
        {"cp": 2, "tp": 2, "ep": 4, "data_parallel": "zero1"},
        {"ep": 2, "data_parallel": "hsdp", "dp_shard": 4},
        {"ep": 2, "tp": 2, "data_parallel": "hsdp", "dp_shard": 2},
    ],
    ids=str,
)
def test_build_mesh_groups_equal_planned_process_groups(layout: Any) -> None:
    """`phalanx mesh` and the run agree on every group of every axis."""
    planned = Layout(**layout)
    sizes = parallel_dims(planned, 8)
    for rank, groups in enumerate(rank_pool(8).run(build_groups_by_axis, planned)):

        def own_group(axis_groups: list[tuple[int, ...]], rank: int = rank) -> list[int]:
            (group,) = [group for group in axis_groups if rank in group]
            return list(group)

        expected = {
            axis: own_group(process_groups(sizes, axis)) for axis in ("pp", "cp", "tp") if getattr(sizes, axis) > 1
        }
        expected["dp"] = own_group(process_groups(sizes, "dp_replicate", "dp_shard", "cp"))
        expected["ep"] = own_group(expert_parallel_groups(sizes))
        expert_index = expected["ep"].index(rank)
        assert expert_index == sizes.expert_rank(rank)
        stage = own_group(process_groups(sizes, "dp_replicate", "dp_shard", "cp", "tp"))
        expected["same experts"] = stage[expert_index :: sizes.ep]
        assert {name: ranks for name, ranks in groups.items() if len(ranks) > 1} == {
            name: ranks for name, ranks in expected.items() if len(ranks) > 1
        }
