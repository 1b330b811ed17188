"""Rollbacks after divergence: the run returns to a checkpoint, and skips the text that led there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.runs.events import read_events
from phalanx.spec.run import RunSpec
from phalanx.train import worker
from phalanx.train.create_run import create_run
from phalanx.train.guards.divergence import (
    MIN_HISTORY,
    LossSpikeDetector,
    count_rollbacks,
    record_rollback,
    steps_to_skip,
)
from phalanx.train.learner import MicroBatch
from phalanx.train.rank_options import RankOptions
from phalanx.train.trainer import Trainer
from tests.helpers.small_runs import make_trainer, shared_data_cache, small_run, train_until
from tests.helpers.training_processes import recorded_losses

STEPS, CHECKPOINT_EVERY, SPIKE_STEP = 30, 6, 15
CHANGES = {
    "training.steps": STEPS,
    "checkpoint.every": CHECKPOINT_EVERY,
    "checkpoint.keep": 9,
    "recovery.max_rollbacks": 2,
}


@pytest.fixture
def run(tmp_path: Path) -> RunSpec:
    shared_data_cache()
    return small_run(Path(json.__file__).parent, tmp_path, CHANGES)


def replace_targets(monkeypatch: pytest.MonkeyPatch, sequences: range, targets: Any) -> None:
    """Give these sequences of the text, counted from the run's beginning, other targets."""

    class Spoiled(Trainer):
        def micro_batches(self, batch: Any, *sums: Any) -> list[MicroBatch]:
            micros = super().micro_batches(batch, *sums)
            if self.module.training and self.loader.loader.first_sequence(self.step) in sequences:  # type: ignore[attr-defined]
                return [replace(micro, targets=targets(micro.targets)) for micro in micros]
            return micros

    monkeypatch.setattr(worker, "Trainer", Spoiled)


def inverted_targets(targets: torch.Tensor) -> torch.Tensor:
    return 256 - targets  # bytes that the model has never seen


def test_loss_spike_rolls_back_and_skips_the_offending_steps(
    run: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run returns to the checkpoint before the spike; then its losses are those of a run that skips the text
    since."""
    run = run.model_copy(update={"recovery": run.recovery.model_copy(update={"loss_spike_ratio": 1.5})})
    directory, first_sequence = create_run(run, 1, resume=False), (SPIKE_STEP - 1) * 8
    replace_targets(monkeypatch, range(first_sequence, first_sequence + 8), inverted_targets)
    assert worker.run_rank(directory, RankOptions(resume=True)) == 0
    (rollback,) = [event for event in read_events(directory) if event["kind"] == "rolled_back"]
    assert (rollback["after"], rollback["to"]) == (SPIKE_STEP, 12)
    assert "times the recent median" in rollback["reason"]
    reference = make_trainer(small_run(Path(json.__file__).parent, tmp_path / "one", CHANGES))
    before = train_until(reference, 12)
    reference.loader.skip_steps(SPIKE_STEP - 12)
    assert recorded_losses(directory) == before + train_until(reference, STEPS)


def test_nonfinite_steps_roll_back_until_max_rollbacks_then_run_fails(
    run: RunSpec, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before its first checkpoint, the run returns to its beginning."""
    training = run.training.model_copy(update={"max_nonfinite_steps": 2})
    run = run.model_copy(update={"training": training})
    directory = create_run(run, 1, resume=False)
    forward = Trainer.forward_backward

    def infinite(self: Trainer, micros: list[MicroBatch]) -> Any:
        sums = forward(self, micros)
        if self.loader.loader.first_sequence(self.step) >= 3 * 8:  # type: ignore[attr-defined]
            for parameter in self.module.parameters():
                parameter.grad.fill_(torch.inf)
        return sums

    monkeypatch.setattr(Trainer, "forward_backward", infinite)
    assert worker.run_rank(directory, RankOptions(resume=True)) == 1
    rollbacks = [(event["after"], event["to"]) for event in read_events(directory) if event["kind"] == "rolled_back"]
    assert rollbacks == [(5, 0), (2, 0)]
    assert count_rollbacks(directory) == 2
    assert steps_to_skip(directory, 0) == 7
    stderr = capsys.readouterr().err
    assert "rolling back to step 0; skipping the text of steps 1 to 5" in stderr
    assert stderr.count("2 consecutive steps were not finite") == 3


def scale_weights_once(monkeypatch: pytest.MonkeyPatch, step: int, factor: float) -> None:
    """Scale all weights after the first update of this step."""
    update, done = Trainer.update, []

    def update_and_scale(self: Trainer, ratio: float) -> None:
        update(self, ratio)
        if self.step == step - 1 and not done:
            done.append(step)
            for parameter in self.module.parameters():
                parameter.data.mul_(factor)

    monkeypatch.setattr(Trainer, "update", update_and_scale)


def recorded_rollbacks(directory: Path) -> list[tuple[int, int]]:
    return [(event["after"], event["to"]) for event in read_events(directory) if event["kind"] == "rolled_back"]


@pytest.mark.parametrize(
    ("every", "expected_rollbacks"),
    [(2, [(10, 4)]), (1, [(10, 5), (10, 4)])],
    ids=["nothing is saved since", "what the update left was saved"],
)
def test_rollback_goes_further_back_when_checkpoint_has_nonfinite_weights(
    every: int, expected_rollbacks: list[tuple[int, int]], run: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No checkpoint is saved while steps are not finite. A checkpoint from which the run diverges again is not used a
    second time."""
    checkpoint = run.checkpoint.model_copy(update={"every": every})
    training = run.training.model_copy(update={"max_nonfinite_steps": 5})
    directory = create_run(run.model_copy(update={"checkpoint": checkpoint, "training": training}), 1, resume=False)
    scale_weights_once(monkeypatch, 5, float("nan"))
    assert worker.run_rank(directory, RankOptions(resume=True)) == 0
    assert recorded_rollbacks(directory) == expected_rollbacks
    assert all(torch.isfinite(torch.tensor(recorded_losses(directory)[-1])))


def test_rollback_quarantines_checkpoint_that_spikes_again(run: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollback keeps the history of losses, with which the next loss is compared."""
    run = run.model_copy(update={"recovery": run.recovery.model_copy(update={"loss_spike_ratio": 1.5})})
    directory = create_run(run, 1, resume=False)
    scale_weights_once(monkeypatch, 12, 30.0)
    assert worker.run_rank(directory, RankOptions(resume=True)) == 0
    assert recorded_rollbacks(directory) == [(13, 12), (13, 6)]
    losses = [loss for loss, _ in recorded_losses(directory)]
    assert losses[-1] < losses[0]
    assert (directory / "checkpoints" / "step-00000012.damaged").is_dir()


def test_rollback_fails_when_no_older_checkpoint_exists(run: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    training = run.training.model_copy(update={"max_nonfinite_steps": 2})
    directory = create_run(run.model_copy(update={"training": training}), 1, resume=False)
    scale_weights_once(monkeypatch, CHECKPOINT_EVERY, float("nan"))
    assert worker.run_rank(directory, RankOptions(resume=True)) == 1
    assert recorded_rollbacks(directory) == [(8, 6)]


def test_steps_to_skip_accumulates_over_repeated_rollbacks(tmp_path: Path) -> None:
    record_rollback(tmp_path, 15, 12, "a spike")
    assert (steps_to_skip(tmp_path, 12), steps_to_skip(tmp_path, 6)) == (3, 0)
    record_rollback(tmp_path, 14, 12, "a spike")
    assert steps_to_skip(tmp_path, 12) == 5
    record_rollback(tmp_path, 13, 6, "a spike")
    assert (steps_to_skip(tmp_path, 12), steps_to_skip(tmp_path, 6)) == (0, 12)


def test_loss_spike_detector_compares_loss_with_recent_losses() -> None:
    losses = LossSpikeDetector(max_ratio=2.0)
    assert all(losses.spike_ratio(9.0 - step / 10) is None for step in range(MIN_HISTORY))
    assert losses.spike_ratio(16.0) is None
    assert losses.spike_ratio(18.0) == pytest.approx(18 / 8.6, rel=0.02)
    assert losses.spike_ratio(float("nan")) is None
    assert all(LossSpikeDetector(max_ratio=None).spike_ratio(loss) is None for loss in (*[1.0] * MIN_HISTORY, 100.0))


def test_loss_spike_detector_needs_ten_losses_before_a_spike() -> None:
    for count, is_detected in ((MIN_HISTORY - 1, False), (MIN_HISTORY, True)):
        losses = LossSpikeDetector(max_ratio=2.0)
        assert all(losses.spike_ratio(1.0) is None for _ in range(count))
        assert (losses.spike_ratio(100.0) is not None) == is_detected
