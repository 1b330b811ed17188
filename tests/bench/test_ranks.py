"""Collectives are measured over the groups of the run, with the sizes that the run sends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.bench.collective_calls import process_group_for
from phalanx.bench.collectives import collective_kinds_of_run
from phalanx.bench.ranks import run_benchmarks
from phalanx.cost.exact.traffic import traffic_by_group
from phalanx.parallel.mesh import build_mesh
from phalanx.spec.communication_groups import group_ranks
from phalanx.spec.parallel_dims import parallel_dims
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from tests.helpers.dry_run_cases import DENSE, FEW_HEADS, MOE, dry_run_case
from tests.helpers.small_runs import small_run

Groups = dict[tuple[str, str], tuple[int, ...]]


def groups_of_this_rank(run: RunSpec) -> Groups:
    """Return the ranks of this rank's group for each kind of collective."""
    world_size = dist.get_world_size()
    mesh = build_mesh(run.layout, world_size, "cpu")
    groups = {}
    for kind in collective_kinds_of_run(run, traffic_by_group(ResolvedRun(run, world_size))):
        group = process_group_for(run, mesh, kind)
        assert isinstance(group, dist.ProcessGroup)
        groups[kind.operation, kind.group_kind] = tuple(sorted(dist.get_process_group_ranks(group)))
    return groups


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        *[dry_run_case(4, data_parallel=data) for data in ("ddp", "zero1", "zero3")],
        dry_run_case(4, MOE, data_parallel="hsdp", dp_shard=2),
        dry_run_case(4, MOE, data_parallel="hsdp", dp_shard=2, ep=2),
        dry_run_case(4, FEW_HEADS, tp=4, data_parallel="zero1"),
        dry_run_case(4, cp=2, cp_method="ring", data_parallel="zero1"),
        dry_run_case(4, MOE, ep=2),
        dry_run_case(4, MOE, ep=2, data_parallel="zero3"),
        dry_run_case(4, {**DENSE, "tie_embeddings": True}, pp=2, data_parallel="zero1", schedule="zb-h1"),
        dry_run_case(4, MOE, pp=2, ep=2, data_parallel="zero1"),
        dry_run_case(4, pp=2, tp=2, rank_order="pipeline_outer"),
    ],
    ids=str,
)
def test_benchmark_groups_equal_planned_groups(world_size: int, changes: dict[str, Any], tmp_path: Path) -> None:
    run = small_run(Path(json.__file__).parent, tmp_path, changes)
    dims = parallel_dims(run.layout, world_size)
    for rank, groups in enumerate(rank_pool(world_size).run(groups_of_this_rank, run)):
        assert groups
        for (_, group_kind), group in groups.items():
            assert group == group_ranks(run, dims, group_kind, rank), (rank, group_kind)  # type: ignore[arg-type]


def test_broadcast_benchmark_group_is_server_with_its_workers(tmp_path: Path) -> None:
    run = small_run(
        Path(json.__file__).parent, tmp_path, dry_run_case(4, data_parallel="parameter_server", num_servers=2)[1]
    )
    (result, *_) = rank_pool(4).run(benchmark_rank, run, ["collectives"], [])
    by_operation = {row["operation"]: row for row in result["collectives"]}
    assert by_operation["broadcast"]["groups"] == [(0, 2, 3)]
    assert by_operation["send"]["groups"] == [(0, 1, 2, 3)]


def benchmark_rank(run: RunSpec, parts: list[str], sweep: list[int]) -> dict[str, Any]:
    return run_benchmarks(run, torch.device("cpu"), parts, 2, sweep)


def test_collective_benchmark_uses_sizes_and_groups_of_the_run(tmp_path: Path) -> None:
    """With two copies of two tensor-parallel ranks, both groups of a kind are measured at the same time."""
    run = small_run(Path(json.__file__).parent, tmp_path, dry_run_case(4, FEW_HEADS, tp=2)[1])
    (benchmark, *_) = rank_pool(4).run(benchmark_rank, run, ["collectives"], [4096, 8192])
    collectives = {(entry["operation"], entry["among"]): entry for entry in benchmark["collectives"]}
    (rows,) = traffic_by_group(ResolvedRun(run, 4)).values()
    assert set(collectives) == {(row.operation, row.group_kind) for row in rows}
    gradients = collectives["all_reduce", "data"]
    assert gradients["groups"] == [(0, 2), (1, 3)]
    run_sizes = [entry["size_bytes"] for entry in gradients["sizes"] if entry["calls"]]
    assert run_sizes == [round(row.bytes / row.calls) for row in rows if row.group_kind == "data"]
    assert [row["size"] for row in gradients["nccl_tests"]["results"]] == sorted([4096, 8192, *run_sizes])
    assert [device["group"] for device in gradients["nccl_tests"]["config"]["devices"]] == [0, 1, 0, 1]
    for entry in collectives.values():
        assert entry["nccl_tests"]["out_of_bounds"]["count"] == 0
        sizes = [result["size"] for result in entry["nccl_tests"]["results"]]
        assert (entry["fit"]["from_bytes"], entry["fit"]["to_bytes"]) == (sizes[0], sizes[-1])
        assert [residual["size_bytes"] for residual in entry["fit"]["residuals"]] == sizes


def test_run_benchmarks_measures_only_requested_parts(tmp_path: Path) -> None:
    run = small_run(Path(json.__file__).parent, tmp_path, dry_run_case(2)[1])
    result, other_result = rank_pool(2).run(benchmark_rank, run, ["attention"], [])
    assert "attention" in result
    assert not {"matmul", "bandwidth", "collectives"} & set(result)
    assert result["attention"] == other_result["attention"]  # each rank returns the times of the slowest rank
