"""Callbacks that evaluate the model: held-out loss and text samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.runs.metrics import MetricsRecord
from phalanx.train.callbacks.callback import Callback
from phalanx.train.callbacks.guards import is_due
from phalanx.train.sample import generate_sample, is_sample_due, sample_message

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer


class Evaluation(Callback):
    """Evaluates the model every `evaluation.every` steps, and after the last one."""

    def is_due(self, trainer: Trainer) -> bool:
        """Return whether the model is evaluated after this step."""
        return trainer.is_complete or is_due(trainer.step, trainer.run.evaluation.every)

    def on_step_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Evaluate the model."""
        trainer.experts.start_interval()
        with trainer.record_pause("evaluation"):
            trainer.evaluation = trainer.evaluate()
        trainer.call_hook("on_evaluation_end", trainer.evaluation)


class Samples(Callback):
    """Prints `evaluation.samples` continuations of the prompt over the run."""

    def is_due(self, trainer: Trainer) -> bool:
        """Return whether a sample is generated after this step."""
        return is_sample_due(trainer.run, trainer.step)

    def on_step_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Generate a sample."""
        with trainer.record_pause("sample"):
            sample = generate_sample(trainer)
        trainer.progress.log(sample_message(trainer.step, sample))
