"""Held-out losses of a checkpoint, by source: those that training recorded, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.launch.process import init_distributed
from phalanx.runs.metrics import MetricsRecord
from phalanx.spec.errors import UserError
from phalanx.spec.layout import Layout
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from phalanx.train.checkpoint.load_model import find_trained_weights
from phalanx.train.create_run import create_run
from phalanx.train.held_out import evaluate_held_out
from tests.helpers.cli_runner import command_json, command_output
from tests.helpers.small_runs import make_trainer, train_until
from tests.integration.test_mixture import mixed_run


def train_with_evaluations(run: RunSpec) -> tuple[Path, dict[int, MetricsRecord]]:
    """Train a run and save two checkpoints; return its directory and the evaluation at each of them."""
    directory = create_run(run, 1, resume=False)
    trainer = make_trainer(run)
    evaluations = {}
    for last in (2, 4):
        train_until(trainer, last)
        evaluations[last] = trainer.evaluate()
        trainer.save()
        trainer.checkpointer.wait()
    return directory, evaluations


def losses_of(record: Any) -> dict[str, float]:
    """Return the numbers of an evaluation, with that of its text."""
    numbers = {name: value for name, value in record.items() if name.startswith("held_out_")}
    return {**numbers, "held_out_set": int(numbers["held_out_set"], 16)}


def evaluate_in_rank(directory: Path, layout: Layout) -> MetricsRecord:
    return evaluate_held_out(find_trained_weights(directory), layout, init_distributed("cpu"))


def test_losses_of_sources_are_those_of_training_in_any_layout(documents: Path, tmp_path: Path) -> None:
    directory, evaluations = train_with_evaluations(mixed_run(documents, tmp_path))
    expected = losses_of(evaluations[4])
    assert {"held_out_loss/code", "held_out_loss/notes"} < expected.keys()
    assert losses_of(command_json("evaluate", directory)) == pytest.approx(expected, rel=1e-12)
    earlier = command_json("evaluate", directory, "--step", 2)
    assert earlier["step"] == 2
    assert losses_of(earlier) == pytest.approx(losses_of(evaluations[2]), rel=1e-12)
    for layout in (Layout(tp=2), Layout(pp=2), Layout(data_parallel="zero3")):
        for record in rank_pool(2).run(evaluate_in_rank, directory, layout):
            assert losses_of(record) == pytest.approx(expected, rel=1e-10)
    printed = command_output("evaluate", directory)
    assert [line.split()[0] for line in printed.splitlines()] == ["step", "code", "notes", "all"]


def test_losses_of_held_out_sets_by_name_are_printed(documents: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name} text " * 200)
    sets = {name: str(tmp_path / f"{name}.txt") for name in ("a", "b")}
    directory, evaluations = train_with_evaluations(mixed_run(documents, tmp_path, {"data.held_out_sets": sets}))
    printed = command_json("evaluate", directory)
    assert {"held_out_loss/a", "held_out_loss/b"} < printed.keys()
    assert losses_of(printed) == pytest.approx(losses_of(evaluations[4]), rel=1e-12)
    with pytest.raises(UserError, match="--limit = 3 has no effect on held-out losses\n  fix: add --tasks"):
        command_output("evaluate", directory, "--limit", 3)
