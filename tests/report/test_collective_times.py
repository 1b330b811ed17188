"""Collectives of profiled steps: the time on the rank that arrives last."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.plan.calibrate.microbenchmarks import CollectiveTiming
from phalanx.report.collective_times import collective_times
from phalanx.report.measured_run import read_measured_run, with_measured_parts
from phalanx.report.run_data import RunData, read_run
from phalanx.runs.step_records import RankRecord
from tests.helpers import trained_runs


def collective_call(began: float, ended: float | None, exposed: float = 1.0, **changes: Any) -> dict[str, Any]:
    """Return the record of a call; `exposed` is a share of the time."""
    spent = exposed * ((ended or began) - began)
    return {
        "operation": "all_gather",
        "executed_as": "all_gather",
        "group": [1, 3],
        "bytes": 64,
        "start": began,
        "end": ended,
        "exposed": spent,
        **changes,
    }


def build_run_data(*steps: dict[int, list[dict[str, Any]]], **fields: Any) -> RunData:
    """Return a run with the collectives of each rank in each step."""
    lines = {
        rank: [{"step": number, "collectives": step[rank], **fields} for number, step in enumerate(steps, 1)]
        for rank in steps[0]
    }
    ranks = {
        rank: RankRecord(
            rank=rank,
            host="here",
            device="cpu",
            offset_seconds=0.0,
            error_seconds=0.0,
            memory_bytes=1,
            cores=2,
            steps=calls,
        )
        for rank, calls in lines.items()
    }
    return RunData(directory=Path(), run=None, world_size=4, ranks=ranks)


def test_collective_times_use_last_arriving_rank():
    """For two calls of a size per step, the result is the median over the shorter times of both ranks."""
    first_step = {1: [collective_call(0, 5), collective_call(6, 9)], 3: [collective_call(4, 5), collective_call(6, 7)]}
    second_step = {1: [collective_call(0, 3), collective_call(6, 9)], 3: [collective_call(0, 4), collective_call(6, 7)]}
    assert collective_times(build_run_data(first_step, second_step)) == (
        CollectiveTiming(operation="all_gather", ranks=2, stride=2, size_bytes=64, seconds=1),
    )


@pytest.mark.parametrize(
    "calls",
    [
        [collective_call(0, 5, exposed=0.5)],
        [collective_call(0, None)],
        [collective_call(5, 5)],
        [],
        [collective_call(0, 5, group=[1])],
        [collective_call(0, 5, bytes=8)],
    ],
)
def test_collective_times_skip_unmatched_or_overlapped_calls(calls):
    assert not [
        timing
        for timing in collective_times(build_run_data({1: [collective_call(0, 5)], 3: calls}))
        if timing.size_bytes == 64
    ]


def test_collective_times_skip_steps_with_memory_profiling():
    assert collective_times(build_run_data({1: [collective_call(0, 5)], 3: [collective_call(0, 5)]}, memory=[])) == ()


def test_collective_times_exist_only_for_profiled_run():
    measured = with_measured_parts(read_measured_run(trained_runs.hybrid_run()), trained_runs.hybrid_run())
    assert {exchange.operation for exchange in measured.exchanges} >= {"all_reduce"}
    assert all(0 < exchange.seconds < 10 for exchange in measured.exchanges)
    assert {exchange.ranks for exchange in measured.exchanges} <= {2, 4}
    assert (
        with_measured_parts(read_measured_run(trained_runs.two_rank_run()), trained_runs.two_rank_run()).exchanges == ()
    )
    assert collective_times(read_run(trained_runs.two_rank_run())) == ()
