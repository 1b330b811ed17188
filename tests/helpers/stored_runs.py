"""Runs of one process with checkpoints in an object store."""

from __future__ import annotations

import shutil
from pathlib import Path

from phalanx.runs.checkpoint_store import is_complete, list_in_run_directory, store_folder, stored_checkpoints
from phalanx.spec.run import RunSpec
from tests.helpers.small_runs import make_trainer, train_until


def train_and_save(run: RunSpec, steps: list[int]) -> tuple[list[tuple[float, float]], list[str]]:
    """Train, save after these steps, and return the losses and the checkpoints that the store lacks at the end."""
    trainer = make_trainer(run)
    trainer.resume()
    losses = []
    for step in steps:
        losses += train_until(trainer, step)
        trainer.save()
        trainer.checkpointer.wait()
    return losses, trainer.checkpointer.finish_uploads(60)


def directory_of(run: RunSpec) -> Path:
    return Path(run.output_dir) / run.name


def stored_steps(run: RunSpec) -> list[int]:
    """Return the steps of complete checkpoints in the store."""
    steps = stored_checkpoints(str(store_folder(run)))
    return sorted(step for step, objects in steps.items() if is_complete(objects))


def forget_run_directory(run: RunSpec) -> None:
    """Leave what a run finds on another machine: the checkpoints of the store."""
    shutil.rmtree(directory_of(run))
    list_in_run_directory(run, directory_of(run))
