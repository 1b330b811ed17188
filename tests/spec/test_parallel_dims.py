"""Degrees of the axes of a layout, and the groups of ranks along them."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table
from phalanx.spec.layout import Layout
from phalanx.spec.parallel_dims import expert_parallel_groups, parallel_dims, process_groups
from phalanx.spec.resolved_run import ResolvedRun


@pytest.mark.parametrize(
    ("layout", "world_size", "field"),
    [
        ({"tp": 3}, 4, "layout.tp"),
        ({"pp": 2, "cp": 2, "tp": 2}, 4, "layout.pp x cp x tp"),
        ({"dp_shard": 2}, 4, "layout.dp_shard"),
        ({"data_parallel": "hsdp"}, 4, "layout.dp_shard"),
        ({"data_parallel": "hsdp", "dp_shard": 3}, 4, "layout.dp_shard"),
        ({"data_parallel": "hsdp", "dp_shard": 4, "tp": 2}, 4, "layout.dp_shard"),
    ],
)
def test_parallel_dims_rejects_invalid_degrees(layout: Any, world_size: int, field: str) -> None:
    with pytest.raises(UserError) as error_info:
        parallel_dims(Layout(**layout), world_size)
    assert error_info.value.field == field
    assert error_info.value.fix


def test_expert_parallel_groups_stay_within_pipeline_stage() -> None:
    """Groups consist of neighbors. With a pipeline, a group skips the other stages, unless stages are outermost."""
    assert expert_parallel_groups(parallel_dims(Layout(ep=4, tp=2), 8)) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert expert_parallel_groups(parallel_dims(Layout(pp=2, ep=4, tp=2), 8)) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert expert_parallel_groups(parallel_dims(Layout(pp=2, ep=4, tp=2, rank_order="pipeline_outer"), 8)) == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
    ]
    assert expert_parallel_groups(parallel_dims(Layout(), 8)) == []


def test_process_groups_match_published_example_on_16_ranks() -> None:
    """The 16 ranks are 4 stages x 2 tensor-parallel ranks x 2 replicas: rank = dp x 8 + pp x 2 + tp."""
    sizes = parallel_dims(Layout(pp=4, tp=2), 16)
    assert process_groups(sizes, "tp") == [(2 * i, 2 * i + 1) for i in range(8)]
    assert process_groups(sizes, "pp") == [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)]
    assert process_groups(sizes, "dp_replicate") == [(i, i + 8) for i in range(8)]
    assert parallel_dims(Layout(pp=4, tp=4), 32).dp_size == 2


def test_process_groups_of_dp2_pp2_layout_match_expected_ranks() -> None:
    sizes = parallel_dims(Layout(pp=2), 4)
    assert process_groups(sizes, "pp") == [(0, 1), (2, 3)]
    assert process_groups(sizes, "dp_replicate") == [(0, 2), (1, 3)]
    assert process_groups(sizes, "dp_replicate", "pp") == [(0, 1, 2, 3)]


@pytest.mark.parametrize(
    ("layout", "world_size", "precision", "expected"),
    [
        ({}, 1, "bf16", "zero1"),
        ({}, 1, "fp8", "zero1"),
        ({}, 1, "fp32", "ddp"),
        ({}, 2, "bf16", "ddp"),
        ({"tp": 2, "pp": 2}, 4, "bf16", "zero1"),
        ({"cp": 2}, 2, "bf16", "ddp"),
        ({"tp": 2, "ep": 2}, 2, "bf16", "ddp"),
        ({"data_parallel": "zero3"}, 1, "bf16", "zero1"),
        ({"data_parallel": "zero3"}, 1, "fp64", "ddp"),
        ({"data_parallel": "zero3", "offload": "cpu"}, 1, "bf16", "zero2"),
        ({"data_parallel": "zero2", "pp": 2}, 4, "bf16", "zero1"),
        ({"data_parallel": "zero3"}, 2, "bf16", "zero3"),
    ],
)
def test_effective_strategy(layout: Any, world_size: int, precision: Any, expected: str) -> None:
    run = run_from_table({"model": {"preset": "tiny"}, "training": {"precision": precision}, "layout": layout})
    assert ResolvedRun(run, world_size).strategy == expected
