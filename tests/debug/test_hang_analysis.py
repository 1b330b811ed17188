"""Diagnoses of hangs, from artificial dumps, and from programs with a planted fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.debug.hang_analysis import diagnose_hang
from phalanx.runs.hang_dumps import (
    ABORTED,
    FAILED,
)
from phalanx.spec.parallel_dims import ParallelDims
from tests.helpers.hang_dumps import BUSY, WAITING, Op, Program, make_dump, simulate_hang

OPS = st.tuples(
    st.sampled_from(["all", "tp", "dp"]), st.sampled_from(["all_reduce", "all_gather", "all_to_all"]), st.integers(1, 3)
)
LAYOUTS = [
    ParallelDims(dp_shard=4),
    ParallelDims(dp_replicate=3, tp=2),
    ParallelDims(dp_shard=4, tp=2),
    ParallelDims(dp_shard=3, tp=3),
]


@st.composite
def planted_faults(draw: Any) -> tuple[ParallelDims, list[Program], int, int, str]:
    """Return a random program on a random number of ranks, in which one rank skips a collective of all ranks, or calls
    it with another shape or name."""
    sizes = draw(st.sampled_from(LAYOUTS))
    drawn = draw(st.lists(OPS, min_size=1, max_size=12))
    program = [Op(group, operation, size, line) for line, (group, operation, size) in enumerate(drawn)]
    rank, index = draw(st.integers(0, sizes.world_size - 1)), draw(st.integers(0, len(program) - 1))
    fault = draw(st.sampled_from(["skip", "shape", "operation"]))
    program[index] = replace(program[index], group="all", operation="all_reduce")
    faulty_program = list(program)
    if fault == "skip":
        del faulty_program[index]
    else:
        change = {"size": program[index].size + 1} if fault == "shape" else {"operation": "broadcast"}
        faulty_program[index] = replace(program[index], **change)
    programs = [faulty_program if member == rank else program for member in range(sizes.world_size)]
    return sizes, programs, rank, index, fault


@settings(max_examples=150, deadline=None)
@given(planted_faults())
def test_diagnose_hang_names_rank_with_faulty_collective(
    planted: tuple[ParallelDims, list[Program], int, int, str],
) -> None:
    sizes, programs, rank, index, fault = planted
    dumps = simulate_hang(programs, sizes)
    assert dumps is not None
    verdict = diagnose_hang(dumps, {}, sizes).verdict
    assert verdict.ranks == (rank,)
    assert f"rank {rank} (" in verdict.summary
    if fault != "skip":
        expected_op = programs[(rank + 1) % sizes.world_size][index]
        number = sum(op.group == "all" for op in programs[rank][: index + 1])
        assert verdict.kind == "mismatch"
        assert f"in collective {number} of all ranks, rank {rank}" in verdict.summary
        assert (
            f"{expected_op.operation} of [{expected_op.size}] Float at mine/model.py:{expected_op.line} (step)"
            in verdict.summary
        )
    else:
        assert verdict.kind in ("mismatch", "absent", "crossed")


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(LAYOUTS), st.lists(OPS, min_size=1, max_size=12), st.data())
def test_diagnose_hang_names_rank_stuck_outside_collectives(sizes: ParallelDims, drawn: Any, data: Any) -> None:
    """Ranks that wait for it, directly or through others, are not blamed."""
    program = [Op(group, operation, size, line) for line, (group, operation, size) in enumerate(drawn)]
    program.append(Op("all", "all_reduce", 1, 99))
    rank, index = data.draw(st.integers(0, sizes.world_size - 1)), data.draw(st.integers(0, len(program) - 1))
    dumps = simulate_hang([program[:index] if member == rank else program for member in range(sizes.world_size)], sizes)
    assert dumps is not None
    absent = diagnose_hang(dumps, {}, sizes).verdict
    assert (absent.kind, absent.ranks) == ("absent", (rank,))
    assert "mine/model.py:7 (forward)" in absent.summary
    on_gpus = {member: {**dump, "stack": [BUSY], "waiting": False} for member, dump in dumps.items()}
    verdict = diagnose_hang(on_gpus, {}, sizes).verdict  # type: ignore[arg-type]
    assert (verdict.kind, verdict.ranks) == ("absent", (rank,)), (
        "main threads on GPUs wait for the device, in code of the user"
    )
    silent = diagnose_hang({member: dump for member, dump in dumps.items() if member != rank}, {}, sizes).verdict
    assert (silent.kind, silent.ranks) == ("silent", (rank,))
    del on_gpus[rank]
    verdict = diagnose_hang(on_gpus, {}, sizes).verdict  # type: ignore[arg-type]
    assert (verdict.kind, verdict.ranks) == ("silent", (rank,))
    other = dumps[(rank + 1) % sizes.world_size]
    other["sibling_states"] = {str(rank): "T"}
    assert diagnose_hang(dumps, {}, sizes).verdict.kind == "stopped"


def test_diagnose_hang_locates_skipped_collective_by_source_line() -> None:
    sizes = ParallelDims(dp_shard=3)
    program = [Op("all", "all_reduce", 4, line) for line in (10, 20, 30, 40)]
    dumps = simulate_hang([program, [*program[:1], *program[2:]], program], sizes)
    assert dumps is not None
    verdict = diagnose_hang(dumps, {}, sizes).verdict
    assert (verdict.kind, verdict.ranks) == ("absent", (1,))
    assert (
        "from call number 2 of all ranks, its calls came from different lines (mine/model.py:30 (step)"
        in verdict.summary
    )
    assert "other ranks: mine/model.py:20 (step)" in verdict.summary


def test_diagnose_hang_names_busy_stage_when_others_wait_in_pipeline_p2p() -> None:
    """Ranks that wait for a message are not the cause."""
    sizes = ParallelDims(pp=3)
    receive_frame = ("/x/phalanx/parallel/pipeline/p2p.py", 68, "receive")
    dumps = {
        rank: make_dump(rank, sizes, [], BUSY if rank == 1 else receive_frame, waiting=rank != 1) for rank in range(3)
    }
    verdict = diagnose_hang(dumps, {}, sizes).verdict
    assert (verdict.kind, verdict.ranks) == ("absent", (1,))
    assert verdict.summary == (
        "rank 1 (pp=1) was in mine/model.py:7 (forward); "
        "rank 0 (pp=0) and rank 2 (pp=2) waited in pipeline/p2p.py:68 (receive)"
    )


def test_diagnose_hang_reports_lost_pipeline_message_when_all_stages_wait() -> None:
    """No collective is pending, no rank is busy elsewhere, and a finished collective is not to blame."""
    sizes = ParallelDims(pp=2)
    receive_frame = ("/x/phalanx/parallel/pipeline/p2p.py", 68, "receive")
    dumps = {rank: make_dump(rank, sizes, [make_call(5, over=True)], receive_frame, waiting=True) for rank in range(2)}
    explanation = diagnose_hang(dumps, {}, sizes)
    assert (explanation.verdict.kind, explanation.verdict.ranks) == ("lost", (0, 1))
    assert explanation.verdict.summary.startswith(
        "rank 0 (pp=0) in pipeline/p2p.py:68 (receive) and rank 1 (pp=1) in pipeline/p2p.py:68 (receive): no progress"
    )
    failure = {"why": FAILED, "error": "RuntimeError: Timed out"}
    dumps = {
        rank: make_dump(rank, sizes, [make_call(5, over=True)], receive_frame, waiting=True, **failure)
        for rank in range(2)
    }
    explanation = diagnose_hang(dumps, {}, sizes)
    assert explanation.verdict.kind == "nothing"
    assert not any("all_reduce" in line for line in explanation.ranks.values())


def test_diagnose_hang_reports_single_stalled_process() -> None:
    verdict = diagnose_hang(
        {0: make_dump(0, ParallelDims(), [], BUSY)},
        {},
        ParallelDims(),
    ).verdict
    assert (verdict.kind, verdict.ranks) == ("lost", (0,))
    assert verdict.summary.startswith("rank 0 in mine/model.py:7 (forward): no progress")


def test_diagnose_hang_uses_suspect_ranks_of_failure_records() -> None:
    """The rank whose record is the first is not blamed."""
    sizes = ParallelDims(dp_shard=3)
    reason = "step 4: a differs on rank 1"
    failures = {
        rank: {"rank": rank, "reason": reason, "time": 9.0 - rank, "traceback": "...", "suspect_ranks": [1]}
        for rank in range(3)
    }
    verdict = diagnose_hang({}, failures, sizes).verdict
    assert (verdict.kind, verdict.ranks, verdict.summary) == ("error", (1,), reason)
    without_suspects = {
        rank: {**record, "reason": "loss nan", "suspect_ranks": []} for rank, record in failures.items()
    }
    assert diagnose_hang({}, without_suspects, sizes).verdict.ranks == ()


def test_diagnose_hang_reports_unfinished_collective_joined_by_all_ranks() -> None:
    sizes = ParallelDims(dp_shard=2)
    call = {
        "group": "all0",
        "number": 1,
        "operation": "all_reduce",
        "inputs": [[4]],
        "outputs": [],
        "dtypes": ["Float"],
    }
    calls = [{**call, "over": False, "at": ("mine/model.py", 1, "step")}]
    verdict = diagnose_hang({rank: make_dump(rank, sizes, calls, WAITING) for rank in range(2)}, {}, sizes).verdict
    assert verdict.kind == "lost"
    assert "all ranks entered all_reduce of [4] Float, number 1, and it did not finish" in verdict.summary


def test_diagnose_hang_names_killed_or_failed_rank_before_peer_losses() -> None:
    sizes = ParallelDims(dp_shard=2)
    calls = simulate_hang([[Op("all", "all_reduce", 4, 1)], []], sizes)
    assert calls is not None
    calls[0]["error"] = "RuntimeError: gloo: Connection closed by peer"
    lost = {"rank": 0, "reason": calls[0]["error"], "time": 1.0, "traceback": "..."}
    killed = {"rank": 1, "reason": "was killed by SIGKILL and wrote no failure record", "time": 2.0}
    verdict = diagnose_hang(calls, {0: lost, 1: killed}, sizes).verdict
    assert (verdict.kind, verdict.ranks) == ("killed", (1,))
    own = {"rank": 1, "reason": "ValueError: no such file", "time": 2.0, "traceback": "..."}
    verdict = diagnose_hang(calls, {0: lost, 1: own}, sizes).verdict
    assert (verdict.kind, verdict.ranks) == ("error", (1,))
    assert "ValueError: no such file; the other ranks lost the connection to it" in verdict.summary


def make_call(number: int, over: bool = False, **more: Any) -> dict[str, Any]:
    """Return a collective of two ranks."""
    call = {"group": "all0", "number": number, "operation": "all_reduce", "inputs": [[4]], "outputs": []}
    return {**call, "dtypes": ["Float"], "over": over, "at": ("mine/model.py", number, "step"), **more}


def test_diagnose_hang_reports_first_collective_missed_by_late_rank() -> None:
    """Hosts run ahead of their device, and of collectives that they do not wait for."""
    sizes = ParallelDims(dp_shard=3)
    ahead = make_dump(0, sizes, [make_call(1, over=True), *map(make_call, (2, 3, 4))], WAITING)
    behind = make_dump(2, sizes, [make_call(1, over=True), make_call(2)], WAITING)
    late = make_dump(1, sizes, [make_call(1, over=True)], BUSY)
    verdict = diagnose_hang({0: ahead, 1: late, 2: behind}, {}, sizes).verdict
    assert (verdict.kind, verdict.ranks) == ("absent", (1,))
    assert "rank 2 (dp=2) waited in all_reduce of [4] Float, number 2 of all ranks" in verdict.summary


@pytest.mark.parametrize("operation", ["_all_gather_base", "_reduce_scatter_base"])
def test_diagnose_hang_compares_sizes_of_nccl_base_collectives(operation: str) -> None:
    sizes = ParallelDims(dp_shard=3)
    dumps = {
        rank: make_dump(rank, sizes, [make_call(1, operation=operation, inputs=[[6 if rank == 2 else 4]])], WAITING)
        for rank in range(3)
    }
    verdict = diagnose_hang(dumps, {}, sizes).verdict
    assert (verdict.kind, verdict.ranks) == ("mismatch", (2,))


def test_diagnose_hang_reports_aborted_rank_as_killed_unless_waiting() -> None:
    sizes = ParallelDims(dp_shard=2)
    lost = make_dump(0, sizes, [make_call(1)], WAITING, error="RuntimeError: gloo: Connection closed by peer")
    aborted = make_dump(1, sizes, [], BUSY, why=ABORTED, error="aborted (SIGABRT) by a library: see its last output")
    failures = {1: {"rank": 1, "reason": "was killed by SIGABRT and wrote no failure record", "time": 2.0}}
    verdict = diagnose_hang({0: lost, 1: aborted}, failures, sizes).verdict
    assert (verdict.kind, verdict.ranks) == ("killed", (1,))
    assert (
        verdict.summary
        == "rank 1 (dp=1) was aborted (SIGABRT) in mine/model.py:7 (forward); the other ranks lost the connection to it"
    )
    # NCCL's watchdog aborts a rank that waited too long.
    waited, late = make_dump(0, sizes, [make_call(1)], BUSY, why=ABORTED), make_dump(1, sizes, [], BUSY)
    verdict = diagnose_hang({0: waited, 1: late}, {}, sizes).verdict
    assert (verdict.kind, verdict.ranks) == ("absent", (1,))


def test_diagnose_hang_does_not_treat_external_connection_error_as_peer_loss() -> None:
    sizes = ParallelDims(dp_shard=2)
    reason = "ConnectionError: no connection to the host of the text"
    dumps = {0: make_dump(0, sizes, [make_call(1)], WAITING), 1: make_dump(1, sizes, [], BUSY, error=reason)}
    verdict = diagnose_hang(dumps, {1: {"rank": 1, "reason": reason, "time": 2.0, "traceback": "..."}}, sizes).verdict
    assert (verdict.kind, verdict.ranks) == ("error", (1,))


def test_diagnose_hang_labels_group_over_both_dp_axes_as_dp() -> None:
    sizes = ParallelDims(dp_replicate=2, dp_shard=2, pp=2)
    ranks = [0, 2, 4, 6]
    calls = [make_call(1, group="loss")]
    dumps = {rank: make_dump(rank, sizes, calls * (rank != 6), WAITING if rank != 6 else BUSY) for rank in ranks}
    for dump in dumps.values():
        dump["groups"]["loss"] = ranks
    assert "number 1 of the dp ranks 0, 2, 4, 6" in diagnose_hang(dumps, {}, sizes).verdict.summary


def test_diagnose_hang_labels_expert_parallel_group_by_axis() -> None:
    """A group with the ranks of an axis of the mesh has the name of the axis; otherwise it is called ep."""
    for sizes, ranks, label in (
        (ParallelDims(dp_shard=4, ep=2), [2, 3], "the ep ranks 2, 3"),
        (ParallelDims(dp_shard=2, pp=2, tp=2, ep=2), [4, 5], "the tp ranks 4, 5"),
    ):
        late = ranks[1]
        dumps = {
            rank: make_dump(rank, sizes, [make_call(1, group="ep")] * (rank != late), BUSY if rank == late else WAITING)
            for rank in ranks
        }
        for dump in dumps.values():
            dump["groups"]["ep"] = ranks
        verdict = diagnose_hang(dumps, {}, sizes).verdict
        assert f"number 1 of {label}" in verdict.summary, verdict.summary
        assert f"rank {late} (" in verdict.summary


def test_diagnose_hang_returns_nothing_without_dumps() -> None:
    assert diagnose_hang({}, {}, ParallelDims(dp_shard=2)).verdict.kind == "nothing"
