"""Callbacks that save checkpoints, on disk and in memory."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import TYPE_CHECKING

from phalanx.parallel.comm.objects import broadcast_from_rank0
from phalanx.runs.metrics import MetricsRecord
from phalanx.train.callbacks.callback import Callback
from phalanx.train.callbacks.guards import is_due
from phalanx.train.checkpoint.auto_interval import CheckpointScheduler

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer


class CheckpointTimes(Callback):
    """Records the durations of steps, on which the interval "auto" depends."""

    reads_weights = False

    def __init__(self, scheduler: CheckpointScheduler) -> None:
        self.scheduler = scheduler

    def on_step_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Record the duration of a step."""
        self.scheduler.record_step(record["step_seconds"], writing=trainer.checkpointer.is_saving)


class Checkpoints(Callback):
    """Saves checkpoints when they are due, when the run stops, and after the last step.

    A step whose gradient was not finite is saved only if it is the last one, after which the run has to be complete."""

    def __init__(self, scheduler: CheckpointScheduler) -> None:
        self.scheduler = scheduler

    def is_due(self, trainer: Trainer) -> bool:
        """Return whether a checkpoint may be saved."""
        return self.scheduler.is_due(trainer.step) or trainer.is_complete or trainer.should_stop

    def on_train_start(self, trainer: Trainer) -> None:
        """Start to count steps."""
        self.scheduler.start(trainer.step)

    def on_step_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Save if it is due."""
        is_wanted = self.scheduler.is_due(trainer.step) or trainer.should_stop
        if not (is_wanted and _is_sound(trainer, record)) and trainer.step != trainer.run.training.steps:
            return
        with trainer.record_pause("checkpoint"):
            started_at = time.perf_counter()
            trainer.start_checkpoint()
            if trainer.run.checkpoint.every == "auto":
                blocked_seconds = time.perf_counter() - started_at
                write_seconds = trainer.checkpointer.save_seconds
                decide = partial(self.scheduler.next_due_step, trainer.step, blocked_seconds, write_seconds)
                self.scheduler.next_step = broadcast_from_rank0(decide)
                if self.scheduler.reason is not None:
                    trainer.progress.log(self.scheduler.reason)


class InMemoryCopies(Callback):
    """Copies the state into memory every `recovery.in_memory_checkpoint_every` steps."""

    def is_due(self, trainer: Trainer) -> bool:
        """Return whether the state is copied after this step."""
        return is_due(trainer.step, trainer.run.recovery.in_memory_checkpoint_every)

    def on_step_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Copy the state."""
        if _is_sound(trainer, record):
            with trainer.record_pause("copy"):
                trainer.save_in_memory()


def _is_sound(trainer: Trainer, record: MetricsRecord) -> bool:
    """Return whether the weights may be saved: without a finite gradient they may be corrupt.

    Asynchronous ranks are not notified at once."""
    return math.isfinite(record["grad_norm"]) or trainer.run.layout.max_staleness is not None
