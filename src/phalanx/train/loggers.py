"""What a run writes down: metrics.jsonl and TensorBoard always, Weights & Biases if asked. Rank 0 writes."""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from phalanx.launch.preflight import check_wandb
from phalanx.runs.jsonl import read_jsonl
from phalanx.runs.metrics import METRICS_FILE, TENSORBOARD_DIR, WANDB_ID_FILE, MetricsRecord
from phalanx.spec.errors import UserError


class Logger(Protocol):
    """Takes one record: a step's, an evaluation's."""

    def write(self, record: MetricsRecord) -> None:
        """Keep a record. Steps rise; an evaluation may have the step of the record before it."""

    def close(self, failed: bool = False) -> None:
        """End the log. Safe after a failed write, and more than once."""


class JsonLinesLogger:
    """metrics.jsonl: one JSON object a line. JSON has no NaN or infinity: they are written as null."""

    def __init__(self, path: Path, after_step: int, flush_seconds: float = 0.0) -> None:
        """On resume, lines of steps that will be done again are dropped. A line is in the file at once, or after
        `flush_seconds` with the next."""
        self._flush_seconds = flush_seconds
        self._flushed_at = time.monotonic()
        lines = [json.dumps(record) + "\n" for record in read_jsonl(path) if record["step"] <= after_step]
        partial_file = path.with_suffix(".partial")  # a kill while the file is rewritten must not lose it
        with partial_file.open("w") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        partial_file.replace(path)
        self._file = path.open("a")

    def write(self, record: MetricsRecord) -> None:
        finite = {name: None if _not_finite(value) else value for name, value in record.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        now = time.monotonic()
        if now - self._flushed_at >= self._flush_seconds:
            self._file.flush()
            self._flushed_at = now

    def close(self, failed: bool = False) -> None:
        with suppress(OSError):  # of a write that failed before: every other is flushed
            self._file.close()


class TensorBoardLogger:
    """Scalars under the names they have in metrics.jsonl."""

    def __init__(self, directory: Path, after_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=after_step + 1 if after_step else None)

    def write(self, record: MetricsRecord) -> None:
        for name, value in record.items():
            if isinstance(value, int | float) and name not in ("step", "time"):
                self._writer.add_scalar(name, value, record["step"])

    def close(self, failed: bool = False) -> None:
        with suppress(OSError):  # of a write that failed before, in the writer's thread
            self._writer.close()


class WandbLogger:
    """The optional service. Its run has the run directory's own id, so that `--resume` continues it; steps that are
    done again it knows already, and keeps."""

    def __init__(self, project: str, name: str, directory: Path, config: MetricsRecord) -> None:
        import wandb

        try:
            self._run = wandb.init(
                project=project, name=name, id=wandb_id(directory), resume="allow", dir=str(directory), config=config
            )
        except wandb.Error as error:
            raise UserError(
                "metrics.wandb",
                project,
                f"cannot be opened: {error}",
                fix="run `wandb login`, set WANDB_MODE=offline, or remove it",
            ) from None

    def write(self, record: MetricsRecord) -> None:
        self._run.log(record, step=record["step"])

    def close(self, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


def wandb_id(directory: Path) -> str:
    """The W&B id of a run directory, made at first and kept in it."""
    file = directory / WANDB_ID_FILE
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:16])
    return file.read_text()


def open_loggers(directory: Path, after_step: int, wandb: str | None, name: str, config: MetricsRecord) -> list[Logger]:
    """The logs of a run; `after_step` is the last step of the checkpoint it resumes from, 0 for a fresh one.

    Raises UserError, with nothing opened, if W&B is asked for and cannot be had.
    """
    logs: list[Logger] = []
    if wandb is not None:
        check_wandb(wandb)
        logs.append(WandbLogger(wandb, name, directory, config=config))
    logs.append(JsonLinesLogger(directory / METRICS_FILE, after_step))
    logs.append(TensorBoardLogger(directory / TENSORBOARD_DIR, after_step))
    return logs


def _not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
