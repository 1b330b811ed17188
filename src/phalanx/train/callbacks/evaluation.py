"""Callbacks that evaluate the model: held-out loss and text samples."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from phalanx.runs.metrics import MetricsRecord
from phalanx.spec.formatting import plural
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


class EarlyStop(Callback):
    """Ends the run after `evaluations` in a row without a new lowest held-out loss (`evaluation.stop_after`)."""

    reads_weights = False
    STATE = ("held_out_set", "best", "best_step", "without_gain")

    def __init__(self, evaluations: int) -> None:
        self.evaluations = evaluations
        self.held_out_set: str | None = None
        """The evaluated text: losses on another one are not comparable, and are counted from the start."""
        self.best: float | None = None
        self.best_step = 0
        self.without_gain = 0
        """Number of evaluations since the best."""

    def on_evaluation_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Compare the loss with the lowest one."""
        if record["held_out_set"] != self.held_out_set:
            self.held_out_set = record["held_out_set"]
            self.best = None
            self.without_gain = 0
        loss = record["held_out_loss"]
        if math.isfinite(loss) and (self.best is None or loss < self.best):
            self.best = loss
            self.best_step = record["step"]
            self.without_gain = 0
        else:
            self.without_gain += 1
        if self.without_gain >= self.evaluations:
            lowest = "was finite" if self.best is None else f"is below {self.best:.4f}, that of step {self.best_step}"
            trainer.finish(f"no held-out loss of the last {plural(self.without_gain, 'evaluation')} {lowest}")

    def state_dict(self) -> dict[str, Any]:
        """Return the lowest loss, and the number of evaluations since."""
        return {name: getattr(self, name) for name in self.STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue to count."""
        for name in self.STATE:
            setattr(self, name, state[name])


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
