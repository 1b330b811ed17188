"""The interval between checkpoints."""

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
"""Mean time between failures of 16,384 devices (Llama 3, section 3.3.4)."""


def make_scheduler(folder: Path, step_seconds: float = 0.1, **changes: Any) -> CheckpointScheduler:
    run = small_run(TEXT, folder, {"checkpoint.every": "auto", **changes})
    scheduler = CheckpointScheduler(run, 16_384, folder)
    for step in range(1, FIRST_STEPS):
        scheduler.record_step(step_seconds)
        assert not scheduler.is_due(step)
    scheduler.record_step(step_seconds)
    assert scheduler.is_due(FIRST_STEPS)
    return scheduler


def test_checkpoint_scheduler_interval_matches_daly_formula(tmp_path: Path) -> None:
    """A save that takes 10 s is best written every 465.3 s at Llama 3's rate of failures."""
    scheduler = make_scheduler(tmp_path)
    assert scheduler.next_due_step(FIRST_STEPS, blocked_seconds=10, write_seconds=20) == pytest.approx(
        FIRST_STEPS + 4653, abs=1
    )
    assert scheduler.reason is not None
    assert "every 4,653 steps (7.8 minutes)" in scheduler.reason
    assert f"expected time between failures: {LLAMA3_MTBF_HOURS:.1f} hours" in scheduler.reason
    assert not scheduler.is_due(scheduler.next_step - 1)
    assert scheduler.is_due(scheduler.next_step)
    scheduler.next_due_step(scheduler.next_step, blocked_seconds=11, write_seconds=20)
    assert scheduler.reason is None  # much as before


def test_checkpoint_scheduler_never_overlaps_saves(tmp_path: Path) -> None:
    assert (
        make_scheduler(tmp_path).next_due_step(FIRST_STEPS, blocked_seconds=0.001, write_seconds=600)
        == FIRST_STEPS + 6000
    )


def test_checkpoint_scheduler_ignores_one_slow_save(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path)
    usual = scheduler.next_due_step(FIRST_STEPS, blocked_seconds=1, write_seconds=1) - FIRST_STEPS
    scheduler.next_due_step(scheduler.next_step, blocked_seconds=1, write_seconds=1)
    before = scheduler.next_step
    assert scheduler.next_due_step(before, blocked_seconds=50, write_seconds=1) - before == usual


def test_checkpoint_scheduler_counts_slowed_steps_as_save_cost(tmp_path: Path) -> None:
    """The cost of a save is the wait of 0.5 s, and two steps of 1.1 s instead of 0.1 s while it is written."""
    scheduler = make_scheduler(tmp_path)
    save_step = scheduler.next_due_step(FIRST_STEPS, blocked_seconds=0.5, write_seconds=1) - 40
    for seconds, writing in [(1.1, True), (1.1, False)] + 38 * [(0.1, False)]:
        scheduler.record_step(seconds, writing)
    interval = scheduler.next_due_step(save_step + 40, blocked_seconds=0.5, write_seconds=2) - save_step - 40
    mtbf = LLAMA3_MTBF_HOURS * 3600
    assert interval == pytest.approx(optimal_interval_seconds(2.5, mtbf) / 0.1, rel=0.01)


def test_checkpoint_scheduler_saves_more_often_after_observed_failures(tmp_path: Path) -> None:
    kinds = ["started", "failed", "started", "failed", "started", "started", "failed"]  # one unrecorded failure
    now = time.time()
    events = [
        {"time": now - 400 + 50 * at, "kind": kind, "ranks": 2, "rank": 0, "step": 0, "reason": "was killed"}
        for at, kind in enumerate(kinds)
    ]
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (tmp_path / EVENTS_FILE).write_text(lines + '{"half a line')
    scheduler = make_scheduler(tmp_path)
    steps = scheduler.next_due_step(FIRST_STEPS, blocked_seconds=0.5, write_seconds=1) - FIRST_STEPS
    assert steps == pytest.approx(optimal_interval_seconds(0.5, 100) / 0.1, rel=0.02)
    assert scheduler.reason is not None
    assert "expected time between failures: 100 s (4 in 6.7 minutes)" in scheduler.reason


def test_checkpoint_scheduler_follows_fixed_interval(tmp_path: Path) -> None:
    scheduler = CheckpointScheduler(small_run(TEXT, tmp_path, {"checkpoint.every": 4}), 2, tmp_path)
    assert [step for step in range(1, 10) if scheduler.is_due(step)] == [4, 8]
    never = CheckpointScheduler(small_run(TEXT, tmp_path, {"checkpoint.every": 0}), 2, tmp_path)
    assert not any(never.is_due(step) for step in range(1, 10))


def train_and_get_next_due(run: RunSpec) -> int:
    trainer = make_trainer(run)
    train_to_end(trainer)
    return trainer.callbacks["checkpoints"].scheduler.next_step  # type: ignore[attr-defined]


def test_checkpoint_scheduler_agrees_across_ranks(tmp_path: Path) -> None:
    shared_data_cache()
    run = small_run(TEXT, tmp_path, {"checkpoint.every": "auto", "cluster.failures_per_device_hour": 5000.0})
    prepare(run.data)
    first, second = rank_pool(2).run(train_and_get_next_due, run)
    assert first == second
    saved = [path.name for path in checkpoints(tmp_path / "parity" / "checkpoints")]
    assert saved[0] == f"step-{run.training.steps:08d}"
    assert len(saved) == run.checkpoint.keep.last
