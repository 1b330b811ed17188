"""Records read one step late: the same records, weights, checkpoints and stops as when each is read at once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.parallel.dtensor_shards import local_tensor
from phalanx.runs.checkpoints import step_of
from phalanx.runs.metrics import read_metrics
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from phalanx.train.callbacks.callback import Callback
from phalanx.train.callbacks.records import JsonLines
from phalanx.train.create_run import create_run
from tests.helpers.small_runs import make_trainer, small_run, train_to_end

STEPS = 8
BAD_STEPS = {2, 5}
TIMED = ("seconds", "per_second", "time", "mfu", "hfu", "memory")


class StopAt(Callback):
    """A callback that stops the run like a signal, without waiting for the device."""

    reads_weights = False

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Any, record: Any) -> None:
        trainer.stop_requested = record["step"] >= self.step


class SeesCurrentStep(Callback):
    """A callback of a user, which checks that the trainer is at the step of the record."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, trainer: Any, record: Any) -> None:
        assert record["step"] == trainer.step
        assert not trainer.launched
        self.steps.append(trainer.step)


def make_gradients_infinite(trainer: Any) -> None:
    """Multiply the loss of some steps by infinity."""
    losses = trainer.compute_losses

    def poisoned(model: Any, micro: Any) -> Any:
        loss, auxiliary = losses(model, micro)
        return (loss * math.inf if trainer.step + 1 in BAD_STEPS else loss), auxiliary

    trainer.compute_losses = poisoned


def train(run: RunSpec, reads_late: bool, callbacks: dict[str, Callback] | None = None) -> tuple[Any, ...]:
    """Return last step, skipped steps, tokens, and this rank's weights."""
    trainer = make_trainer(run)
    assert trainer.can_read_late
    trainer.allows_late_reads = reads_late
    make_gradients_infinite(trainer)
    train_to_end(trainer, {"metrics": JsonLines()}, user_callbacks=callbacks)
    weights = [local_tensor(p.detach()).clone() for p in trainer.strategy.trainable_parameters.values()]
    return trainer.step, trainer.skipped, trainer.tokens, weights


def untimed_records(directory: Path) -> list[dict[str, Any]]:
    records = [
        {name: value for name, value in record.items() if not any(part in name for part in TIMED)}
        for record in read_metrics(directory)
    ]
    for record in records:
        if record.get("loss", 0.0) is None:  # a skipped step has no rate, or one that it did not use
            del record["learning_rate"]
    return sorted(records, key=lambda record: (record["step"], "loss" not in record))


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, {}),
        (2, {"data_parallel": "ddp"}),
        (2, {"data_parallel": "zero2"}),
        (2, {"data_parallel": "zero3"}),
        (2, {"tp": 2}),
        (2, {"pp": 2}),
    ],
    ids=lambda value: "-".join(f"{name}={field}" for name, field in value.items()) if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("stop_at", [None, 4])
def test_late_reading_changes_nothing(
    stop_at: int | None, ranks: int, layout: dict[str, Any], documents: Path, tmp_path: Path
) -> None:
    results = []
    for reads_late in (False, True):
        changes = {
            "training.steps": STEPS,
            "training.precision": "fp32",
            "evaluation": {"every": 3, "tokens": 128},
            "checkpoint": {"every": 4, "keep": 9},
            "recovery": {"in_memory_checkpoint_every": 0},
            "layout": layout,
        }
        run = small_run(documents, tmp_path / str(reads_late), changes)
        directory = create_run(run, ranks, resume=False)
        callbacks: dict[str, Callback] = {} if stop_at is None else {"stop": StopAt(stop_at)}
        by_rank = rank_pool(ranks).run(train, run, reads_late, callbacks)
        saved = sorted(step_of(path) for path in (directory / "checkpoints").glob("step-????????"))
        results.append((by_rank, untimed_records(directory), saved))
    (at_once, records, saved), (late, late_records, late_saved) = results
    if stop_at is not None:  # the request is part of the next step's sums, which are read a step later
        assert [rank[0] for rank in at_once] == [stop_at + 1] * ranks
        assert [rank[0] for rank in late] == [stop_at + 2] * ranks
        assert late_saved == [4, stop_at + 2]
        assert late_records[: len(records) - 1] == records[:-1]
        return
    assert late_records == records
    assert late_saved == saved == [4, 8]
    for rank, late_rank in zip(at_once, late, strict=True):
        assert late_rank[:3] == rank[:3] == (STEPS, len(BAD_STEPS), rank[2])
        assert all(torch.equal(a, b) for a, b in zip(rank[3], late_rank[3], strict=True))


def test_callback_of_user_sees_weights_of_its_step(documents: Path, tmp_path: Path) -> None:
    run = small_run(documents, tmp_path, {"training.steps": 4, "training.precision": "fp32"})
    create_run(run, 1, resume=False)
    callback = SeesCurrentStep()
    train(run, reads_late=True, callbacks={"mine": callback})
    assert callback.steps == [1, 2, 3, 4]
