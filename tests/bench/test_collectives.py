"""Benchmarked collectives: their sizes equal those of the run, and their results are checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.bench.collective_calls import COLLECTIVE_CALLS
from phalanx.bench.collectives import (
    BenchmarkCase,
    Call,
    CollectiveKind,
    bandwidths,
    benchmark_cases,
    collective_kinds_of_run,
    time_case,
)
from phalanx.cost.exact.traffic import traffic_by_group
from phalanx.cost.formulas.collectives import Operation, Traffic
from phalanx.parallel.comm.collectives import REQUESTED_OPERATION
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from phalanx.train.profiling.collective_recorder import CollectiveRecorder
from tests.helpers.dry_run_cases import DENSE, LAYOUTS, dry_run_case
from tests.helpers.small_runs import small_run

OPERATIONS: list[Operation] = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
BUS_FACTORS = {
    "all_reduce": 1.5,
    "all_gather": 0.75,
    "reduce_scatter": 0.75,
    "all_to_all": 0.75,
    "broadcast": 1,
    "send": 1,
}
"""busbw / algbw among 4 ranks (nccl-tests, doc/PERFORMANCE.md)."""


def make_case(operation: Operation, count: int = 3000) -> BenchmarkCase:
    return BenchmarkCase(
        CollectiveKind(operation, "data", "bf16"), dist.get_world_size() if dist.is_initialized() else 4, 2 * count, 1
    )


def make_run(folder: Path, changes: dict[str, Any]) -> RunSpec:
    return small_run(Path(json.__file__).parent, folder, changes)


# -- which -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "changes"), LAYOUTS)
def test_benchmark_cases_add_up_to_run_traffic(world_size: int, changes: dict[str, Any], tmp_path: Path) -> None:
    """The cases send exactly the bytes of a single role. With several roles they send at least the maximum of them."""
    run = make_run(tmp_path, changes)
    traffic = traffic_by_group(ResolvedRun(run, world_size))
    for kind, roles in collective_kinds_of_run(run, traffic).items():
        n = 4  # any number: the conversions between sizes and sent bytes are inverse functions
        share = BUS_FACTORS[kind.operation]
        cases = benchmark_cases(kind, roles, n)
        sent_bytes = sum(case.calls * case.size_bytes * share for case in cases)
        max_bytes = max(sum(row.bytes for row in rows) for rows in roles)
        rounding = sum(case.calls * 8 * n for case in cases)
        assert sent_bytes >= max_bytes - rounding
        assert len(roles) > 1 or sent_bytes <= max_bytes + rounding


@pytest.mark.parametrize("layout", [{}, {"layout.data_parallel": "zero2"}, {"layout.tp": 2}])
def test_fp8_run_sends_what_a_bf16_run_sends(layout: dict[str, Any], tmp_path: Path) -> None:
    model = {**DENSE, "hidden_size": 64, "ffn_hidden_size": 96}
    kinds = []
    for precision in ("bf16", "fp8"):
        run = make_run(tmp_path, {"model": model, **layout, "training.precision": precision})
        kinds.append(collective_kinds_of_run(run, traffic_by_group(ResolvedRun(run, 4))))
    assert kinds[0] == kinds[1]


def test_benchmark_cases_round_mean_call_size_to_equal_shards() -> None:
    kind = CollectiveKind("all_gather", "data", "bf16")
    rows = [
        Traffic(operation="all_gather", bytes=3 * 750.0, purpose="", calls=3),
        Traffic(operation="all_gather", bytes=750.0, purpose=""),
    ]
    assert benchmark_cases(kind, [rows], 4) == [BenchmarkCase(kind, 4, 1000, 4)]
    assert benchmark_cases(kind, [rows], 4, sweep=[510, 1000]) == [
        BenchmarkCase(kind, 4, 512, 0),
        BenchmarkCase(kind, 4, 1000, 4),
    ]


def test_collective_kinds_use_fp32_gradients_unless_layout_reduces_in_bf16(tmp_path: Path) -> None:
    def kinds(**layout: Any) -> dict[str, str]:
        run = make_run(tmp_path, dry_run_case(2, **layout, **{"training.precision": "bf16"})[1])
        return {
            kind.operation: kind.precision
            for kind in collective_kinds_of_run(run, traffic_by_group(ResolvedRun(run, 2)))
        }

    assert kinds() == {"all_reduce": "fp32"}
    assert kinds(gradient_compression="bf16") == {"all_reduce": "bf16"}
    assert kinds(data_parallel="zero1") == {"reduce_scatter": "bf16", "all_gather": "bf16"}
    assert kinds(data_parallel="zero3") == {"reduce_scatter": "fp32", "all_gather": "bf16"}
    assert kinds(tp=2)["all_gather"] == "bf16"


def test_collective_kinds_of_parameter_server_exclude_recv(tmp_path: Path) -> None:
    run = make_run(tmp_path, dry_run_case(2, DENSE, data_parallel="parameter_server")[1])
    assert {kind.operation for kind in collective_kinds_of_run(run, traffic_by_group(ResolvedRun(run, 2)))} == {
        "broadcast",
        "send",
    }


@pytest.mark.parametrize("operation", OPERATIONS)
def test_busbw_equals_algbw_times_nccl_tests_factor(operation: Operation) -> None:
    assert bandwidths(BenchmarkCase(CollectiveKind(operation, "data", "fp32"), 4, 4000, 1), 2.0) == (
        2000,
        2000 * BUS_FACTORS[operation],
    )


# -- whether it is right -----------------------------------------------------------------------------------------------


def count_wrong_elements(operation: Operation, call: Call) -> dict[str, int | None]:
    assert dist.group.WORLD is not None
    return dict(time_case(make_case(operation), call, dist.group.WORLD, torch.device("cpu"), 2).num_wrong)


def count_wrong_of_correct_call(operation: Operation) -> dict[str, int | None]:
    return count_wrong_elements(operation, COLLECTIVE_CALLS[operation])


def no_op_call(out: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
    """No-op: a collective that leaves its output unchanged."""


def count_wrong_of_corrupted_call(operation: Operation) -> dict[str, int | None]:
    """Return the wrong elements that are counted when rank 0 receives one wrong number."""

    def call(out: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
        COLLECTIVE_CALLS[operation](out, sent, group)
        if group.rank() == 0:
            out[7] = out[7] + 1

    return count_wrong_elements(operation, call)


def count_wrong_of_no_op_call(operation: Operation) -> dict[str, int | None]:
    return count_wrong_elements(operation, no_op_call)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_collective_benchmark_finds_no_errors_in_correct_calls(operation: Operation, world_size: int) -> None:
    unchecked = operation in ("all_to_all", "send")
    for wrong in rank_pool(world_size).run(count_wrong_of_correct_call, operation):
        assert wrong == {"out_of_place": 0, "in_place": None if unchecked else 0}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_collective_benchmark_counts_corrupted_and_missing_elements(operation: Operation) -> None:
    assert [wrong["out_of_place"] for wrong in rank_pool(2).run(count_wrong_of_corrupted_call, operation)] == [1, 0]
    assert all(wrong["out_of_place"] for wrong in rank_pool(2).run(count_wrong_of_no_op_call, operation))


def record_benchmark_calls(operation: Operation) -> list[tuple[str, int]]:
    assert dist.group.WORLD is not None
    with CollectiveRecorder(REQUESTED_OPERATION.get) as recorder:
        time_case(make_case(operation), COLLECTIVE_CALLS[operation], dist.group.WORLD, torch.device("cpu"), 2)
    dist.barrier()
    return [(call.operation, call.size_bytes) for call in recorder.calls]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_collective_benchmark_calls_have_operation_and_size_of_case(operation: Operation) -> None:
    """Timed calls are recorded as in training: warm-up, two iterations
    and the check, each out of place and in place."""
    for calls in rank_pool(2).run(record_benchmark_calls, operation):
        assert [call for call in calls if call[0] == operation] == [(operation, 6000)] * 8
