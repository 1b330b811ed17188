"""Callbacks that write and show records."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from phalanx.runs.metrics import MetricsRecord
from phalanx.train.callbacks.callback import Callback
from phalanx.train.evaluator import evaluation_message
from phalanx.train.loggers import Logger

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer


class MetricsLogging(Callback):
    """Writes the records of steps, every `metrics.every` steps, and of evaluations."""

    def __init__(self, logs: list[Logger]) -> None:
        self.logs = logs

    def on_step_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Write the record if it is due."""
        if is_recorded(trainer, record):
            self._write(record)

    def on_evaluation_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Write the record."""
        self._write(record)

    def _write(self, record: MetricsRecord) -> None:
        for log in self.logs:
            log.write({**record, "time": round(time.time(), 3)})


class RankRecords(Callback):
    """Writes this rank's record of each step, and shows the progress."""

    def on_step_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Write this rank's record, and advance the progress."""
        if trainer.rank_log is not None and trainer.step_record is not None:
            trainer.rank_log.write(dict(trainer.step_record))
        trainer.progress.advance(record)

    def on_evaluation_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Print the evaluation, except the last one, which is printed at the end."""
        if trainer.step < trainer.run.training.steps:
            trainer.progress.log(f"step {trainer.step}: {evaluation_message(record)}")


def is_recorded(trainer: Trainer, record: MetricsRecord) -> bool:
    """Return whether the record of a step is written: every `metrics.every` steps, and that of the last step."""
    return record["step"] % trainer.run.metrics.every == 0 or record["step"] == trainer.run.training.steps


def numbers(record: MetricsRecord) -> dict[str, float]:
    """Return the finite numbers of a record, without its step."""
    return {
        name: value
        for name, value in record.items()
        if name != "step" and isinstance(value, int | float) and math.isfinite(value)
    }
