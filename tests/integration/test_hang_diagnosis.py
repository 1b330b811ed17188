"""Real runs that hang: a rank is stopped or late, or calls other collectives than the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.debug.explain_run import explain_run
from phalanx.debug.hang_messages import Explanation
from phalanx.runs.checkpoints import checkpoints
from phalanx.runs.hang_dumps import read_failures
from phalanx.runs.metrics import read_metrics
from phalanx.spec.errors import EXIT_STOPPED
from phalanx.testing.fault_injection import NotAllowed, memory_limited
from phalanx.testing.processes import WAIT_SECONDS, rank_pids
from tests.helpers.faulty_runs import TIMEOUT_SECONDS, create_run_directory, start_faulty_run, wait_for_failure
from tests.helpers.training_processes import wait_for_steps


def checked_explanation(directory: Path, stderr: str) -> Explanation:
    print(stderr)
    explanation = explain_run(directory)
    assert f"why: {explanation.verdict.summary}" in stderr
    assert f"phalanx debug {directory}" in stderr
    assert stderr.count("phalanx: ") == 1
    print(explanation)
    return explanation


def test_hang_diagnosis_names_stopped_rank_within_timeout(text: Path, tmp_path: Path) -> None:
    directory = create_run_directory(text, tmp_path, 4, {"layout.pp": 2, "layout.tp": 2, "layout.micro_batch_size": 1})
    process = start_faulty_run(directory, 4, "none")
    try:
        wait_for_steps(process, directory, 3)
        os.kill(rank_pids(directory)[1], signal.SIGSTOP)
        start = time.monotonic()
        while not list((directory / "hangs").glob("rank-00000.json")):
            assert time.monotonic() < start + WAIT_SECONDS
            time.sleep(0.02)
        print(f"named after {time.monotonic() - start:.1f} s of {TIMEOUT_SECONDS}")
        verdict = explain_run(directory).verdict
        assert (verdict.kind, verdict.ranks) == ("stopped", (1,))
    finally:
        stderr = wait_for_failure(process)
    explanation = checked_explanation(directory, stderr)
    assert (explanation.verdict.kind, explanation.verdict.ranks) == ("stopped", (1,))
    assert "rank 1 (pp=0, tp=1) was stopped (SIGSTOP)" in explanation.verdict.summary


@pytest.mark.parametrize(
    ("layout", "axis", "pending_call"),
    [({}, "dp", "all_reduce"), ({"layout.pp": 2, "layout.micro_batch_size": 1}, "pp", "pipeline/p2p.py")],
    ids=["ddp", "pp"],
)
def test_hang_diagnosis_names_late_rank_as_absent(
    layout: dict[str, Any], axis: str, pending_call: str, text: Path, tmp_path: Path
) -> None:
    directory = create_run_directory(text, tmp_path, 2, layout)
    explanation = checked_explanation(directory, wait_for_failure(start_faulty_run(directory, 2, "late")))
    assert (explanation.verdict.kind, explanation.verdict.ranks, explanation.step) == ("absent", (1,), 3)
    assert f"rank 1 ({axis}=1) was in helpers/faulty_rank.py" in explanation.verdict.summary
    assert f"rank 0 ({axis}=0) waited in {pending_call}" in explanation.verdict.summary


def test_watchdog_discards_hang_dumps_when_run_continues(text: Path, tmp_path: Path) -> None:
    directory = create_run_directory(text, tmp_path, 2, {"training.steps": 6})
    process = start_faulty_run(directory, 2, "pause")
    try:
        has_dump, deadline = False, time.monotonic() + WAIT_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            has_dump = has_dump or bool(list((directory / "hangs").glob("*.json")))
            time.sleep(0.02)
    finally:
        _, stderr = process.communicate(timeout=WAIT_SECONDS)
    assert has_dump, "the pause exceeds the watchdog's timeout"
    assert process.returncode == 0, stderr
    assert not (directory / "hangs").exists()


@pytest.mark.parametrize(
    ("fault", "peer_call", "faulty_call"),
    [
        ("shape", "all_reduce of [400000] Float", "all_reduce of [1000] Float"),
        ("skipped", "all_reduce of [4] Float", "all_to_all of [3, "),
        ("order", "all_reduce of [4] Float", "all_gather of [4] Float"),
    ],
)
def test_hang_diagnosis_names_rank_with_mismatched_collective(
    fault: str, peer_call: str, faulty_call: str, text: Path, tmp_path: Path
) -> None:
    directory = create_run_directory(
        text, tmp_path, 3, {"layout.data_parallel": "zero1", "training.tokens_per_step": 288}
    )
    explanation = checked_explanation(directory, wait_for_failure(start_faulty_run(directory, 3, fault)))
    assert (explanation.verdict.kind, explanation.verdict.ranks, explanation.step) == ("mismatch", (1,), 3)
    assert f"rank 1 (dp=1) called {faulty_call}" in explanation.verdict.summary
    assert f"called {peer_call} at helpers/faulty_rank.py" in explanation.verdict.summary


def test_sigterm_waits_for_slow_checkpoint_beyond_collective_timeout(text: Path, tmp_path: Path) -> None:
    """Saving takes longer than the collective timeout, which does not apply because no collective waits."""
    directory = create_run_directory(text, tmp_path, 2, {})
    process = start_faulty_run(directory, 2, "disk")
    try:
        wait_for_steps(process, directory, 5)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=WAIT_SECONDS)
    finally:
        process.kill()
    assert process.returncode == EXIT_STOPPED, stderr
    assert checkpoints(directory / "checkpoints")[0].name == f"step-{read_metrics(directory)[-1]['step']:08d}", stderr
    assert not (directory / "hangs").exists()


def test_sigterm_during_resume_stops_rank_after_first_step(text: Path, tmp_path: Path) -> None:
    """The signal comes while the rank reads its checkpoint, which may take minutes."""
    directory = create_run_directory(text, tmp_path, 1, {})
    command = [sys.executable, "-m", "tests.helpers.faulty_rank", "signaled early", str(directory)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2]) as process:
        try:
            assert process.wait(timeout=WAIT_SECONDS) == EXIT_STOPPED
        finally:
            process.kill()
    assert [path.name for path in checkpoints(directory / "checkpoints")] == ["step-00000001"]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("library", "was aborted (SIGABRT) in helpers/faulty_rank.py"),
        ("abort", "was killed by SIGABRT: Aborted in helpers/faulty_rank"),
    ],
)
def test_failure_report_names_rank_that_aborted(fault: str, cause: str, text: Path, tmp_path: Path) -> None:
    directory = create_run_directory(text, tmp_path, 2, {})
    stderr = wait_for_failure(start_faulty_run(directory, 2, fault))
    print(stderr)
    assert "phalanx: rank 1 was killed by SIGABRT: Aborted in helpers/faulty_rank.py" in stderr
    assert "why:" not in stderr, "no rank left out a collective"
    verdict = explain_run(directory).verdict
    assert (verdict.kind, verdict.ranks) == ("killed", (1,))
    assert f"rank 1 (dp=1) {cause}" in verdict.summary


def test_hang_diagnosis_reports_mismatch_when_pythonfaulthandler_is_set(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    # Longer than the time after which the rank is aborted.
    directory = create_run_directory(text, tmp_path, 2, {"training.collective_timeout_seconds": 60.0})
    verdict = checked_explanation(directory, wait_for_failure(start_faulty_run(directory, 2, "shape"))).verdict
    assert (verdict.kind, verdict.ranks) == ("mismatch", (0, 1))


def test_oom_report_lists_resident_bytes_of_failed_rank(text: Path, tmp_path: Path) -> None:
    directory = create_run_directory(text, tmp_path, 2, {})
    stderr = wait_for_failure(start_faulty_run(directory, 2, "memory"))
    print(stderr)
    assert "rank 1 failed after step 3: out of memory: 1.07 GB requested with" in stderr
    failure = read_failures(directory)[1]
    held = failure["held_bytes"]
    assert failure["wanted_bytes"] == 2**30
    assert held["parameters"] == 4 * 32_000
    assert held["optimizer"] == 2 * held["parameters"]  # AdamW's two moments; gradients were dropped before
    assert sum(held[part] for part in ("parameters", "gradients", "optimizer", "rest")) == held["total"]
    assert 0 < held["total"] <= held["peak"]
    verdict = explain_run(directory).verdict
    assert (verdict.kind, verdict.ranks) == ("error", (1,))


def test_failure_report_names_rank_killed_by_kernel_oom_killer(text: Path, tmp_path: Path) -> None:
    # The kernel first reclaims other memory of the group, which is slow.
    changes = {"training.collective_timeout_seconds": 60.0}
    directory = create_run_directory(text, tmp_path, 2, changes)
    try:
        with memory_limited(3 * 2**29) as join:
            stderr = wait_for_failure(start_faulty_run(directory, 2, "much", lambda: join(os.getpid())))
    except NotAllowed as not_allowed:
        pytest.skip(str(not_allowed))
    print(stderr)
    assert "phalanx: rank 1 was killed by SIGKILL, by the kernel's OOM killer" in stderr
    verdict = explain_run(directory).verdict
    assert (verdict.kind, verdict.ranks) == ("killed", (1,))
    assert "by the kernel's OOM killer" in verdict.summary
