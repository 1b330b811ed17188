"""When checkpoints are due."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.cost.formulas.reliability import optimal_interval_seconds
from phalanx.data.prepare import prepare
from phalanx.runs.checkpoints import checkpoints
from phalanx.runs.events import EVENTS_FILE
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from phalanx.train.checkpoint.auto_interval import FIRST_STEPS, CheckpointScheduler
from tests.helpers.small_runs import make_trainer, shared_data_cache, small_run, train_to_end

TEXT = Path(json.__file__).parent
LLAMA3_MTBF_HOURS = 3.0931
"""Between failures of 16,384 devices (Llama 3, section 3.3.4)."""


def make_scheduler(folder: Path, step_seconds: float = 0.1, **changes: Any) -> CheckpointScheduler:
    run = small_run(TEXT, folder, {"checkpoint.every": "auto", **changes})
    found = CheckpointScheduler(run, 16_384, folder)
    for step in range(1, FIRST_STEPS):
        found.record_step(step_seconds)
        assert not found.is_due(step)
    found.record_step(step_seconds)
    assert found.is_due(FIRST_STEPS)
    return found


def test_checkpoint_scheduler_interval_matches_daly_formula(tmp_path: Path) -> None:
    """A save that takes 10 s is best written every 465.3 s at Llama 3's rate of failures."""
    pacing = make_scheduler(tmp_path)
    assert pacing.next_due_step(FIRST_STEPS, blocked_seconds=10, write_seconds=20) == pytest.approx(
        FIRST_STEPS + 4653, abs=1
    )
    assert pacing.reason is not None
    assert "every 4,653 steps (7.8 minutes)" in pacing.reason
    assert f"expected time between failures: {LLAMA3_MTBF_HOURS:.1f} hours" in pacing.reason
    assert not pacing.is_due(pacing.next_step - 1)
    assert pacing.is_due(pacing.next_step)
    pacing.next_due_step(pacing.next_step, blocked_seconds=11, write_seconds=20)
    assert pacing.reason is None  # much as before


def test_checkpoint_scheduler_never_overlaps_saves(tmp_path: Path) -> None:
    assert (
        make_scheduler(tmp_path).next_due_step(FIRST_STEPS, blocked_seconds=0.001, write_seconds=600)
        == FIRST_STEPS + 6000
    )


def test_checkpoint_scheduler_ignores_one_slow_save(tmp_path: Path) -> None:
    pacing = make_scheduler(tmp_path)
    usual = pacing.next_due_step(FIRST_STEPS, blocked_seconds=1, write_seconds=1) - FIRST_STEPS
    pacing.next_due_step(pacing.next_step, blocked_seconds=1, write_seconds=1)
    before = pacing.next_step
    assert pacing.next_due_step(before, blocked_seconds=50, write_seconds=1) - before == usual


def test_checkpoint_scheduler_counts_slowed_steps_as_save_cost(tmp_path: Path) -> None:
    """The wait of half a second, and two steps of 1.1 s instead of 0.1 behind which it was written."""
    pacing = make_scheduler(tmp_path)
    begun = pacing.next_due_step(FIRST_STEPS, blocked_seconds=0.5, write_seconds=1) - 40
    for seconds, writing in [(1.1, True), (1.1, False)] + 38 * [(0.1, False)]:
        pacing.record_step(seconds, writing)
    found = pacing.next_due_step(begun + 40, blocked_seconds=0.5, write_seconds=2) - begun - 40
    mtbf = LLAMA3_MTBF_HOURS * 3600
    assert found == pytest.approx(optimal_interval_seconds(2.5, mtbf) / 0.1, rel=0.01)


def test_checkpoint_scheduler_saves_more_often_after_observed_failures(tmp_path: Path) -> None:
    kinds = ["started", "failed", "started", "failed", "started", "started", "failed"]  # one unrecorded failure
    now = time.time()
    events = [
        {"time": now - 400 + 50 * at, "kind": what, "ranks": 2, "rank": 0, "step": 0, "reason": "was killed"}
        for at, what in enumerate(kinds)
    ]
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (tmp_path / EVENTS_FILE).write_text(lines + '{"half a line')
    pacing = make_scheduler(tmp_path)
    steps = pacing.next_due_step(FIRST_STEPS, blocked_seconds=0.5, write_seconds=1) - FIRST_STEPS
    assert steps == pytest.approx(optimal_interval_seconds(0.5, 100) / 0.1, rel=0.02)
    assert pacing.reason is not None
    assert "expected time between failures: 100 s (4 in 6.7 minutes)" in pacing.reason


def test_checkpoint_scheduler_follows_fixed_interval(tmp_path: Path) -> None:
    pacing = CheckpointScheduler(small_run(TEXT, tmp_path, {"checkpoint.every": 4}), 2, tmp_path)
    assert [step for step in range(1, 10) if pacing.is_due(step)] == [4, 8]
    never = CheckpointScheduler(small_run(TEXT, tmp_path, {"checkpoint.every": 0}), 2, tmp_path)
    assert not any(never.is_due(step) for step in range(1, 10))


def train_and_get_next_due(run: RunSpec) -> int:
    under_way = make_trainer(run)
    train_to_end(under_way)
    return under_way.callbacks["checkpoints"].scheduler.next_step  # type: ignore[attr-defined]


def test_checkpoint_scheduler_agrees_across_ranks(tmp_path: Path) -> None:
    shared_data_cache()
    run = small_run(TEXT, tmp_path, {"checkpoint.every": "auto", "cluster.failures_per_device_hour": 5000.0})
    prepare(run.data)
    first, second = rank_pool(2).run(train_and_get_next_due, run)
    assert first == second
    saved = [path.name for path in checkpoints(tmp_path / "parity" / "checkpoints")]
    assert saved[0] == f"step-{run.training.steps:08d}"
    assert len(saved) == run.checkpoint.keep
