"""Marks in the curves: restarts, resumes, rollbacks, and what changed at a start."""

from __future__ import annotations

from typing import Any

from phalanx.report.marks import run_marks
from phalanx.runs.events import FAILED, FINISHED, ROLLED_BACK, STARTED

Event = dict[str, Any]


def start(step: int, ranks: int = 2, **fields: Any) -> Event:
    return {"kind": STARTED, "step": step, "ranks": ranks, **fields}


def test_run_marks_is_empty_for_a_run_with_one_start() -> None:
    assert run_marks([start(0, settings={"layout.pp": 1}), {"kind": FINISHED, "step": 8}]) == []


def test_run_marks_names_causes_of_starts() -> None:
    events = [
        start(0),
        {"kind": FAILED, "rank": 1, "step": 27, "reason": "exited with code 1"},
        start(20),
        {"kind": ROLLED_BACK, "after": 33, "to": 30, "reason": "loss spike"},
        start(30),
        {"kind": FINISHED, "step": 40},
        start(40),
        start(45),
    ]
    assert [(mark["step"], mark["kind"], mark["text"]) for mark in run_marks(events)] == [
        (20, "restart", "step 20: restarted after a failure (rank 1 exited with code 1, step 27)"),
        (30, "rollback", "step 30: rolled back from step 33 (loss spike)"),
        (40, "resume", "step 40: resumed"),
        (45, "restart", "step 45: restarted after an end that was not recorded"),
    ]


def test_run_marks_names_changes_of_layout_and_config() -> None:
    """A start without settings has those of the start before."""
    events = [
        start(0, settings={"layout.pp": 1, "optimizer.learning_rate": 0.1, "data.train": ["a"]}),
        {"kind": FINISHED, "step": 8},
        start(8, ranks=4, settings={"layout.pp": 2, "optimizer.learning_rate": 0.1}),
        {"kind": FINISHED, "step": 9},
        start(9, ranks=4),
        {"kind": FINISHED, "step": 10},
        start(10, ranks=4, settings={"layout.pp": 2, "optimizer.learning_rate": 0.2}),
    ]
    assert [(mark["kind"], mark["text"]) for mark in run_marks(events)] == [
        ("change", "step 8: resumed; ranks: 4 (before: 2); layout.pp: 2 (before: 1); data.train: none (before: a)"),
        ("resume", "step 9: resumed"),
        ("change", "step 10: resumed; optimizer.learning_rate: 0.2 (before: 0.1)"),
    ]


def test_run_marks_ignores_fields_that_an_earlier_version_did_not_record_and_decided_steps() -> None:
    settings = {"layout.pp": 1}
    events = [start(0), start(4, settings=settings), start(8, settings={**settings, "training.steps": 90})]
    assert [mark["kind"] for mark in run_marks(events)] == ["restart", "restart"]
