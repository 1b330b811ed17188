"""Destinations of records: JSON lines and TensorBoard."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from phalanx.runs.checkpoints import write_synced
from phalanx.runs.jsonl import read_jsonl
from phalanx.runs.metrics import METRICS_FILE, TENSORBOARD_DIR, MetricsRecord
from phalanx.spec.files.replace import open_no_link


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
        # Lines without a step are damaged.
        numbered = [record for record in read_jsonl(path) if type(record.get("step")) is int]
        lines = [json.dumps(record) + "\n" for record in numbered if record["step"] <= after_step]
        # The file is rewritten under another name, so that a kill meanwhile cannot lose it.
        partial_file = path.with_suffix(".partial")
        write_synced(partial_file, "".join(lines))
        partial_file.replace(path)
        self._file = open(path, "a", opener=open_no_link)  # noqa: SIM115 -- closed by `close`

    def write(self, record: MetricsRecord) -> None:
        """Append a record."""
        nonfinite = {name for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
        self._file.write(json.dumps({**record, **dict.fromkeys(nonfinite)}, allow_nan=False) + "\n")
        now = time.monotonic()
        if now - self._flushed_at >= self._flush_seconds:
            self._file.flush()
            self._flushed_at = now

    def close(self, failed: bool = False) -> None:
        """Close the file."""
        # Only a write that failed before can raise here; all others have been flushed.
        with suppress(OSError):
            self._file.close()


class TensorBoardLogger:
    """Log in TensorBoard: the finite numbers of metrics.jsonl.

    PyTorch's SummaryWriter writes in a thread, which would print a traceback of its own when a disk is full."""

    def __init__(self, directory: Path, after_step: int) -> None:
        """Create an event file, and hide the events of steps after `after_step`, which will run again."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = Event
        self._summary: Any = Summary
        directory.mkdir(exist_ok=True)
        created_at = time.time_ns()
        # TensorBoard reads files in the order of their names.
        name = f"events.out.tfevents.{created_at // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.{created_at}"
        self._file = open(directory / name, "xb")  # noqa: SIM115 -- closed by `close`
        self._records: Any = RecordWriter(self._file)
        self._write_event(step=after_step + 1, file_version="brain.Event:2")
        if after_step:
            self._write_event(step=after_step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, record: MetricsRecord) -> None:
        """Write the scalars of a record."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers(record).items()]
        self._write_event(step=record["step"], summary=self._summary(value=values))

    def close(self, failed: bool = False) -> None:
        """Close the file."""
        # Only a write that failed before can raise here; all others have been flushed.
        with suppress(OSError):
            self._file.close()

    def _write_event(self, **contents: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **contents).SerializeToString())
        self._file.flush()


def open_loggers(directory: Path, after_step: int) -> list[Logger]:
    """Open the logs that need no service. Entries after `after_step`, the last before this start, are removed."""
    return [
        JsonLinesLogger(directory / METRICS_FILE, after_step),
        TensorBoardLogger(directory / TENSORBOARD_DIR, after_step),
    ]


def numbers(record: MetricsRecord) -> dict[str, float]:
    """Return the finite numbers of a record, without its step and time."""
    return {
        name: value
        for name, value in record.items()
        if name not in ("step", "time") and isinstance(value, int | float) and math.isfinite(value)
    }
