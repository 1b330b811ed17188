"""Facts and table of the GPUs in a profiled step."""

from __future__ import annotations

from typing import Any

from phalanx.report.gpu_profile.facts import MAX_RANKS_SHOWN, gpu_facts, table_rows, table_title
from phalanx.report.gpu_profile.step import profile_gpu_step
from phalanx.report.gpu_profile.trace import parse_gpu_trace
from tests.helpers.gpu_samples import gpu_run
from tests.helpers.gpu_traces import step_events


def gpu_line(step: int) -> dict[str, Any]:
    """Return the record of a step with the hand-made trace."""
    trace = parse_gpu_trace(step_events("step"))
    return {"step": step, "gpu": profile_gpu_step(trace.events, trace.annotations["step"])}


def test_gpu_facts_are_those_of_last_traced_step() -> None:
    facts = gpu_facts(gpu_run({1: [gpu_line(4), gpu_line(6), {"step": 7}], 0: [gpu_line(6)]}))
    assert facts is not None
    assert facts["step"] == 6
    assert [rank["rank"] for rank in facts["ranks"]] == [0, 1]
    assert gpu_facts(gpu_run({0: [{"step": 1}]})) is None


def test_gpu_table_has_times_groups_and_families() -> None:
    facts = gpu_facts(gpu_run({0: [gpu_line(6)], 1: [gpu_line(6)]}))
    assert facts is not None
    header, *rows = table_rows(facts)
    assert header == ["", "rank 0", "rank 1"]
    cells = {row[0]: row[1] for row in rows}
    assert cells == {
        "step": "1.00 ms  100 %",
        "compute": "530 µs  53.0 %",
        "exposed communication": "200 µs  20.0 %",
        "exposed memcpy and memset": "50.0 µs  5.0 %",
        "idle": "220 µs  22.0 %",
        "  of it late launches": "90.0 µs  9.0 %",
        "exposed communication of mesh_dp_shard": "150 µs  15.0 %",
        "exposed communication of mesh_tp": "50.0 µs  5.0 %",
        "kernels: matrix products": "180 µs  1 x",
        "kernels: attention": "150 µs  1 x",
        "kernels: norms and elementwise": "100 µs  1 x",
        "kernels: optimizer": "100 µs  1 x",
        "kernels: NCCL": "400 µs  3 x",
        "kernels: copies": "50.0 µs  1 x",
    }
    assert table_title(facts) == "times of the GPUs in step 6"


def test_gpu_table_names_groups_without_description_and_marks_absent_ones() -> None:
    first, second = gpu_line(6), gpu_line(6)
    first["gpu"]["groups"][0]["description"] = "undefined"
    second["gpu"]["groups"] = []
    facts = gpu_facts(gpu_run({0: [first], 1: [second]}))
    assert facts is not None
    rows = {row[0]: row[1:] for row in table_rows(facts)}
    assert rows["exposed communication of group 3"] == ["150 µs  15.0 %", "-"]


def test_gpu_table_shows_ranks_that_compute_longest() -> None:
    lines = {rank: [gpu_line(6)] for rank in range(MAX_RANKS_SHOWN + 1)}
    lines[0][0]["gpu"]["compute_seconds"] = 0.0
    facts = gpu_facts(gpu_run(lines))
    assert facts is not None
    assert table_rows(facts)[0] == ["", *(f"rank {rank}" for rank in range(1, MAX_RANKS_SHOWN + 1))]
    assert table_title(facts).endswith(", the 8 of 9 that compute longest")
