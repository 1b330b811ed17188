"""Callbacks of the training loop: what a user, and Phalanx itself, does around steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.runs.errors import CallbackError, DivergenceError
from phalanx.runs.metrics import MetricsRecord
from phalanx.spec.components import ComponentSpec
from phalanx.spec.errors import UserError
from phalanx.train.components import call_component, import_component

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer


class Callback:
    """Hooks of the training loop; a subclass overrides those that it needs.

    Every hook runs on every rank. The user's callbacks run in the order of the run file, so hooks may communicate. An
    error in a hook ends the run. Records hold sums over all ranks; the times in them are those of the rank.

    Example:
        >>> class StopAtLoss(phalanx.Callback):
        ...     def __init__(self, loss: float) -> None:
        ...         self.loss = loss
        ...
        ...     def on_step_end(self, trainer, record):
        ...         if record["loss"] < self.loss:
        ...             trainer.finish(f"the loss is below {self.loss}")
        >>> StopAtLoss(2.5).state_dict()
        {}"""

    reads_weights = True
    """True if `on_step_end` uses the weights after the step. Otherwise a GPU may run the next step meanwhile, so that
    `trainer.step` is one ahead of the record."""

    def is_due(self, trainer: Trainer) -> bool:
        """Return whether `on_step_end` of `trainer.step` must run before another step: equal on all ranks.

        It is asked of callbacks that read weights. If it is False, `on_step_end` of that step does not run."""
        return True

    def on_train_start(self, trainer: Trainer) -> None:
        """Run before the first step of this start, after a checkpoint was restored."""

    def on_step_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Run after a step, with its record as in metrics.jsonl; see `reads_weights`."""

    def on_evaluation_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Run after an evaluation, with its record as in metrics.jsonl."""

    def on_checkpoint_saved(self, trainer: Trainer, directory: Path) -> None:
        """Run after the first step at which a checkpoint is complete on all ranks."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Run on a rank whose training raises an error; the other ranks may be in another step.

        With zero1 and zero2, the weights of the module may come from two steps. Each rank's
        `strategy.trainable_parameters` are always complete."""

    def on_train_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Run after the last step of this start, with the record of the last evaluation."""

    def state_dict(self) -> dict[str, Any]:
        """Return state to save in checkpoints, in JSON types and equal on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`."""


def call_callback(name: str, method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method of the callback `name`.

    Raises CallbackError if a callback of the user raised an error, other than one that Phalanx handles."""
    try:
        return method(*arguments)
    except (UserError, DivergenceError):
        raise
    except Exception as error:
        if not name.startswith("callbacks."):
            raise
        raise CallbackError(f"{name}: {method.__name__} raised {type(error).__name__}: {error}") from error


def build_callbacks(specs: Mapping[str, ComponentSpec]) -> dict[str, Callback]:
    """Build the callbacks of a run file, by field: "callbacks.NAME" never equals the name of a callback of every run.

    Raises UserError if a class cannot be imported, is not a callback, or rejects its arguments."""
    callbacks: dict[str, Callback] = {}
    for name, spec in specs.items():
        field = f"callbacks.{name}"
        callback_class = import_component(field, spec)
        if not (isinstance(callback_class, type) and issubclass(callback_class, Callback)):
            fix = "derive the class from phalanx.Callback"
            raise UserError(field, spec.class_path, "is not a subclass of phalanx.Callback", fix)
        callbacks[field] = call_component(field, spec)
    return callbacks
