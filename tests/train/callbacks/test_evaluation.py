"""Early stop by held-out loss: when it ends a run, what it records, and that it counts across a resume."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.report.facts import report_facts
from phalanx.report.formatting import run_summary
from phalanx.report.run_data import read_run
from phalanx.runs.summary import summarize_run
from phalanx.train import worker
from phalanx.train.callbacks.callback import Callback
from phalanx.train.callbacks.evaluation import EarlyStop
from phalanx.train.create_run import create_run
from phalanx.train.rank_options import RankOptions
from tests.helpers.cli_runner import command_output
from tests.helpers.small_runs import small_run

HERE = f"{__name__}:"


class StopAt(Callback):
    """Stops the run like a signal, after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Any, record: Any) -> None:
        trainer.stop_requested = trainer.step == self.step


def evaluations_until_end(losses: list[float], evaluations: int, held_out_sets: str | None = None) -> int | None:
    """Return the number of evaluations after which a run ends, or None."""
    reasons: list[str] = []
    trainer: Any = SimpleNamespace(finish=reasons.append)
    callback = EarlyStop(evaluations)
    for number, loss in enumerate(losses, 1):
        held_out_set = held_out_sets[number - 1] if held_out_sets else "a"
        callback.on_evaluation_end(trainer, {"step": number, "held_out_loss": loss, "held_out_set": held_out_set})
        if reasons:
            return number
    return None


@pytest.mark.parametrize(
    ("losses", "evaluations", "held_out_sets", "end"),
    [
        ([5, 4, 3, 2], 1, None, None),
        ([5, 4, 4], 1, None, 3),
        ([5, 4, 4.5, 3.9, 4.5, 4.4], 2, None, 6),
        ([math.nan, 5, math.inf, math.nan], 2, None, 4),
        ([math.nan, math.nan], 2, None, 2),
        ([2, 3, 4, 5, 6], 3, "aabbb", None),
        ([2, 3, 4, 5, 6], 2, "aabbb", 5),
    ],
    ids=["falling", "equal", "a better one between", "not finite", "never finite", "other text", "counted on it"],
)
def test_early_stop_counts_evaluations_without_lower_loss(
    losses: list[float], evaluations: int, held_out_sets: str | None, end: int | None
) -> None:
    assert evaluations_until_end(losses, evaluations, held_out_sets) == end


def test_early_stop_ends_run_across_resume_and_records_reason(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {
        "training.steps": 50,
        "optimizer.learning_rate": 1e-30,  # added to a weight, it rounds to nothing: no loss is below the first
        "evaluation": {"every": 1, "tokens": 64, "stop_after": 3},
        "callbacks": {"stop": {"class": HERE + "StopAt", "step": 2}},
    }
    directory = create_run(small_run(text, tmp_path, changes), 1, resume=False)
    worker.run_rank(directory, RankOptions(resume=True, trust=True))
    assert summarize_run(directory).state == "stopped"
    assert summarize_run(directory).finish_reason is None
    worker.run_rank(directory, RankOptions(resume=True, trust=True))

    summary = summarize_run(directory)
    # The first evaluation is the lowest. Three more are not lower, and the run ends after the next step.
    assert (summary.state, summary.step, summary.steps) == ("finished", 5, 5)
    assert summary.finish_reason is not None
    assert summary.finish_reason.startswith("no held-out loss of the last 3 evaluations is below ")
    assert summary.finish_reason.endswith(", that of step 1")
    assert f"finishing the run after the next step: {summary.finish_reason}" in capsys.readouterr().err
    assert f"ended early: {summary.finish_reason}" in command_output("runs", directory).replace("\n", " ")
    assert f"step 5 of 5, ended early: {summary.finish_reason}" in run_summary(report_facts(read_run(directory))["run"])
