"""Callbacks that write and show records."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from phalanx.runs.metrics import METRICS_FILE, TENSORBOARD_DIR, MetricsRecord
from phalanx.train.callbacks.callback import Callback
from phalanx.train.evaluator import evaluation_message
from phalanx.train.loggers import JsonLinesLogger, Logger, TensorBoardLogger

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer


class RecordWriter(Callback, ABC):
    """Writes records on rank 0: one every `metrics.every` steps, and one per evaluation.

    A subclass opens the destination."""

    reads_weights = False
    logger: Logger | None = None

    @abstractmethod
    def open(self, trainer: Trainer) -> Logger:
        """Open the destination on rank 0, before the first step of a start."""

    def on_train_start(self, trainer: Trainer) -> None:
        """Open the destination."""
        self.logger = self.open(trainer) if trainer.is_main else None

    def on_step_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Write the record if it is due. The record of the last step always is."""
        if record["step"] % trainer.run.metrics.every == 0 or record["step"] == trainer.run.training.steps:
            self._write_record(record)

    def on_evaluation_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Write the record."""
        self._write_record(record)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Close the destination of a failed run."""
        self._close_logger(failed=True)

    def on_train_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Close the destination."""
        self._close_logger(failed=False)

    def _write_record(self, record: MetricsRecord) -> None:
        if self.logger is not None:
            self.logger.write({**record, "time": round(time.time(), 3)})

    def _close_logger(self, failed: bool) -> None:
        if self.logger is not None:
            self.logger.close(failed)
            self.logger = None


class JsonLines(RecordWriter):
    """Writes metrics.jsonl in the run directory."""

    def open(self, trainer: Trainer) -> Logger:
        """Open the file, and drop steps that run again."""
        return JsonLinesLogger(trainer.directory / METRICS_FILE, trainer.step)


class TensorBoard(RecordWriter):
    """Writes the event files of TensorBoard in the run directory."""

    def open(self, trainer: Trainer) -> Logger:
        """Open the event file, and hide steps that run again."""
        return TensorBoardLogger(trainer.directory / TENSORBOARD_DIR, trainer.step)


class Progress(Callback):
    """Shows the progress and evaluations on rank 0."""

    reads_weights = False

    def on_step_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Advance the progress."""
        trainer.progress.advance(record)

    def on_evaluation_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Print the evaluation, except the last one, which is printed at the end."""
        if trainer.step < trainer.run.training.steps:
            trainer.progress.log(f"step {trainer.step}: {evaluation_message(record)}")
