"""`phalanx debug` on the files that ranks wrote."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from phalanx.runs.events import FAILED, FINISHED, QUARANTINED, ROLLED_BACK, STARTED, append_event
from phalanx.runs.hang_dumps import write_dump, write_failure
from phalanx.runs.lock import acquire_run_lock
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import write_effective_layout
from phalanx.spec.layout import Layout
from phalanx.spec.parallel_dims import ParallelDims
from tests.helpers.cli_runner import command_json, command_output
from tests.helpers.hang_dumps import Op, simulate_hang

RUN = 'name = "first"\n[model]\npreset = "tiny"\n[training]\nsteps = 50\n'


@pytest.fixture
def hung_run_directory(tmp_path: Path) -> Path:
    sizes = ParallelDims(dp_replicate=3)
    program = [Op("all", "all_reduce", 4, 10), Op("all", "all_gather", 4, 20)]
    dumps = simulate_hang([program, program[1:], program], sizes)
    assert dumps is not None
    (tmp_path / "run.toml").write_text(RUN)
    for dump in dumps.values():
        write_dump(tmp_path, dump)
    return tmp_path


def test_debug_names_rank_with_mismatched_collective_and_lists_all_ranks(hung_run_directory: Path) -> None:
    lines = command_output("debug", hung_run_directory).splitlines()
    assert lines[0] == (
        "in collective 1 of all ranks, rank 1 (dp=1) called all_gather of [4] Float at mine/model.py:20 (step), "
        "while rank 0 (dp=0) and rank 2 (dp=2) called all_reduce of [4] Float at mine/model.py:10 (step)"
    )
    assert lines[1].startswith("what to do: call the same collectives in the same order")
    assert lines[2] == "the last step that all reporting ranks finished: 3"
    assert [line[:17] for line in lines[4:]] == ["  rank 0 (dp=0): ", "> rank 1 (dp=1): ", "  rank 2 (dp=2): "]


def test_debug_json_has_same_verdict_as_text(hung_run_directory: Path) -> None:
    report = command_json("debug", hung_run_directory)
    assert (report["verdict"]["kind"], report["verdict"]["ranks"], report["step"]) == ("mismatch", [1], 3)
    assert report["verdict"]["summary"] == command_output("debug", hung_run_directory).splitlines()[0]


def test_debug_rejects_directory_without_run_toml(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no run\.toml"):
        command_output("debug", tmp_path)


def test_debug_reports_that_no_failure_records_exist(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    assert "no rank reported a pending collective" in command_output("debug", tmp_path)


def test_debug_reports_current_state_and_earlier_failure_of_restarted_run(tmp_path: Path) -> None:
    """Restarted ranks delete their hang dumps and failure records."""
    (tmp_path / "run.toml").write_text(RUN)
    append_event(tmp_path, STARTED, ranks=2, step=0)
    verdict = ["why: rank 1 (dp=1) was stopped (SIGSTOP)", "details: phalanx debug runs/first"]
    append_event(tmp_path, FAILED, rank=0, step=41, reason="RuntimeError: Timed out", verdict=verdict)
    append_event(tmp_path, STARTED, ranks=2, step=40)
    lock = acquire_run_lock(tmp_path)
    assert lock is not None
    state, _, earlier_failure, *_ = command_output("debug", tmp_path).splitlines()
    assert state == "the run is active, and no rank has hung since it started"
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "rank-00000.jsonl").write_text("")
    assert re.search(r"; the last step was recorded \d+ s ago\nwhat to do: wait: ", command_output("debug", tmp_path))
    failure = ": rank 0 RuntimeError: Timed out, step 41; why: rank 1 (dp=1) was stopped (SIGSTOP)"
    assert earlier_failure.startswith("before: ")
    assert earlier_failure.endswith(failure)
    lock.close()
    assert command_output("debug", tmp_path).startswith("the run ended without a record: its launcher was killed, or")
    resume = f"phalanx train {tmp_path} --resume"
    assert f"{resume} to start over from step 0: there is no checkpoint yet" in command_output("debug", tmp_path)
    (tmp_path / "checkpoints" / "step-00000040").mkdir(parents=True)
    assert f"{resume} to continue\n" in command_output("debug", tmp_path)
    fault = tmp_path / "hangs" / "rank-00001.fault"
    fault.parent.mkdir()
    fault.write_text(
        "Fatal Python error: Bus error\n\nCurrent thread 0x7f (most recent call first):\n"
        '  File "/x/train/worker.py", line 3 in work\n'
    )
    output = command_output("debug", tmp_path)
    assert output.startswith("rank 1 was killed by a signal: Bus error in train/worker.py:3 (work)\nwhat to do: read ")
    fault.unlink()
    append_event(tmp_path, QUARANTINED, checkpoint="step-00000040", problem="checksum is wrong")
    assert ": step-00000040 was damaged and quarantined: checksum is wrong" in command_output("debug", tmp_path)
    append_event(tmp_path, ROLLED_BACK, after=47, to=40, reason="a spike")
    assert "before: " in command_output("debug", tmp_path)
    assert ": a spike; from step 47 to step 40" in command_output("debug", tmp_path)
    append_event(tmp_path, FINISHED, step=49)
    assert "wrote no hang dump" not in command_output("debug", tmp_path)
    assert command_output("debug", tmp_path).startswith(
        "the run was stopped cleanly after step 49 of 50\nwhat to do: run phalanx "
    )
    append_event(tmp_path, FINISHED, step=50)
    assert command_output("debug", tmp_path).startswith("the run finished after step 50")
    reason = "DistStoreError: Timed out"
    write_failure(tmp_path, {"rank": 1, "step": 50, "time": 1.0, "reason": reason, "code": 1, "traceback": "..."})
    assert command_output("debug", tmp_path).startswith("rank 1 failed: DistStoreError: Timed out")


def test_debug_reports_hang_and_earlier_failure_of_restarted_run(hung_run_directory: Path) -> None:
    append_event(hung_run_directory, STARTED, ranks=3, step=0)
    append_event(hung_run_directory, FAILED, rank=2, step=7, reason="was killed by SIGKILL", verdict=[])
    assert "before: " not in command_output("debug", hung_run_directory)
    append_event(hung_run_directory, STARTED, ranks=3, step=5)
    output = command_output("debug", hung_run_directory)
    assert "rank 1 (dp=1) called all_gather" in output
    assert "before: " in output
    assert ": rank 2 was killed by SIGKILL, step 7" in output


def test_debug_uses_layout_of_last_start(hung_run_directory: Path) -> None:
    """The last start may have fewer ranks than the run file, in another layout."""
    (hung_run_directory / "run.toml").write_text(RUN + "[layout]\npp = 2\n")
    write_effective_layout(hung_run_directory, Layout(tp=3))
    assert "rank 1 (tp=1) called all_gather" in command_output("debug", hung_run_directory)


def test_debug_prints_coordinates_of_single_failed_rank(tmp_path: Path) -> None:
    """A failure record does not contain the number of ranks."""
    (tmp_path / "run.toml").write_text(RUN + "[layout]\npp = 2\ntp = 2\n")
    write_failure(tmp_path, {"rank": 1, "reason": "ValueError: its own", "time": 1.0, "traceback": "..."})
    append_event(tmp_path, STARTED, ranks=4, step=0)
    assert command_output("debug", tmp_path).startswith("rank 1 (pp=0, tp=1) failed by itself: ValueError: its own")
