"""Callbacks that end training when its state is unsound."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from phalanx.runs.errors import DivergenceError
from phalanx.runs.metrics import MetricsRecord
from phalanx.train.callbacks.callback import Callback
from phalanx.train.guards.divergence import LossSpikeDetector
from phalanx.train.guards.replica_check import check_replica_consistency

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer


class ReplicaCheck(Callback):
    """Raises CorruptionError if replicated state differs between ranks."""

    def is_due(self, trainer: Trainer) -> bool:
        """Return whether replicas are compared, every `training.replica_check_interval` steps."""
        return is_due(trainer.step, trainer.run.training.replica_check_interval)

    def on_step_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Compare the replicas."""
        every = trainer.run.training.replica_check_interval
        error = check_replica_consistency(trainer.strategy, trainer.optimizers, trainer.mesh.dims, trainer.step, every)
        if error is not None:
            trainer.checkpointer.wait()
            raise error


class NonfiniteSteps(Callback):
    """Raises DivergenceError after too many steps in a row whose gradient was not finite."""

    reads_weights = False

    def __init__(self) -> None:
        self.in_a_row = 0
        self.last_seen_step = -1

    def on_step_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Count the step; an asynchronous worker may receive the record of a step twice."""
        is_new_step = record["step"] != self.last_seen_step
        self.last_seen_step = record["step"]
        if math.isfinite(record["grad_norm"]):
            self.in_a_row = 0
            return
        if is_new_step:
            self.in_a_row += 1
            trainer.progress.log(f"step {record['step']}: skipped, {_describe_step(record)}")
        if self.in_a_row >= trainer.run.training.max_nonfinite_steps:
            trainer.checkpointer.wait()
            remedy = "lower optimizer.learning_rate or increase optimizer.warmup_steps"
            if _ignores_all_targets(record):
                remedy = "let data.dataset return targets other than -100"
            raise DivergenceError(
                f"step {record['step']}: {self.in_a_row} consecutive steps were not finite ({_describe_step(record)}); "
                f"{remedy}, then continue with --resume"
            )


class LossSpikes(Callback):
    """Raises DivergenceError at a spike of the loss; another trainer then resumes from before it."""

    reads_weights = False

    def __init__(self, detector: LossSpikeDetector) -> None:
        self.detector = detector

    def on_step_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Compare the loss with those of the last steps."""
        ratio = self.detector.spike_ratio(record["loss"])
        if ratio is not None:
            trainer.checkpointer.wait()
            spike = f"loss {record['loss']:.4g} is {ratio:.1f} times the recent median"
            raise DivergenceError(f"step {record['step']}: {spike}")


def is_due(step: int, every: int) -> bool:
    """Return whether an action that happens `every` steps (0: never) is due after this step."""
    return every > 0 and step % every == 0


def _ignores_all_targets(record: MetricsRecord) -> bool:
    return bool(record["targets_per_second"] == 0)


def _describe_step(record: MetricsRecord) -> str:
    if _ignores_all_targets(record):
        return "all targets are -100"
    return f"loss {record['loss']:.4g}, gradient norm {record['grad_norm']:.4g}"
