"""Loggers of a run, written by rank 0: metrics.jsonl, TensorBoard and optionally Weights & Biases."""

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
    """Destination of records of steps and evaluations."""

    def write(self, record: MetricsRecord) -> None:
        """Write a record; steps increase, but an evaluation may repeat the step of the previous record."""

    def close(self, failed: bool = False) -> None:
        """Close the log; safe after a failed write, and more than once."""


class JsonLinesLogger:
    """Log in metrics.jsonl: one JSON object per line, with null for NaN and infinity, which JSON lacks."""

    def __init__(self, path: Path, after_step: int, flush_seconds: float = 0.0) -> None:
        """Open the file, and drop the lines of steps after `after_step`, which will run again.

        A line is in the file at once, or after `flush_seconds` with the next line."""
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
        """Append a record."""
        finite = {name: None if _not_finite(value) else value for name, value in record.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        now = time.monotonic()
        if now - self._flushed_at >= self._flush_seconds:
            self._file.flush()
            self._flushed_at = now

    def close(self, failed: bool = False) -> None:
        """Close the file."""
        with suppress(OSError):  # from a write that failed before; all others are flushed
            self._file.close()


class TensorBoardLogger:
    """Scalars with their names in metrics.jsonl."""

    def __init__(self, directory: Path, after_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=after_step + 1 if after_step else None)

    def write(self, record: MetricsRecord) -> None:
        """Write the scalars of a record."""
        for name, value in record.items():
            if isinstance(value, int | float) and name not in ("step", "time"):
                self._writer.add_scalar(name, value, record["step"])

    def close(self, failed: bool = False) -> None:
        """Close the writer."""
        with suppress(OSError):  # from a write that failed before, in the writer's thread
            self._writer.close()


class WandbLogger:
    """The optional service.

    Its run has the run directory's own id, so that `--resume` continues it. It ignores steps that run again, and keeps
    the first record."""

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
                fix="run `wandb login`, set WANDB_MODE=offline, or remove metrics.wandb",
            ) from None

    def write(self, record: MetricsRecord) -> None:
        """Send a record."""
        self._run.log(record, step=record["step"])

    def close(self, failed: bool = False) -> None:
        """Finish the W&B run."""
        self._run.finish(exit_code=int(failed))


def wandb_id(directory: Path) -> str:
    """Return the W&B id of a run directory, which is created once and saved there."""
    file = directory / WANDB_ID_FILE
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:16])
    return file.read_text()


def open_loggers(directory: Path, after_step: int, wandb: str | None, name: str, config: MetricsRecord) -> list[Logger]:
    """Open the logs of a run.

    Args:
        directory: Run directory.
        after_step: Last step of the checkpoint that the run resumes from; 0 for a fresh run.
        wandb: W&B project; None for no W&B.
        name: Name of the run.
        config: Run file, for W&B.

    Raises:
        UserError: W&B is requested and not available; then nothing is opened.
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
