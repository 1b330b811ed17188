"""Callback that writes this rank's record of each step, for `phalanx report`."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from phalanx.parallel.comm.device_memory import device_memory_bytes
from phalanx.runs.metrics import MetricsRecord
from phalanx.runs.step_records import FORMAT, RunHeader, rank_record_file
from phalanx.spec.errors import UserError
from phalanx.train.callbacks.callback import Callback
from phalanx.train.loggers import JsonLinesLogger, Logger
from phalanx.train.profiling.clock_sync import measure_clock_offset
from phalanx.train.profiling.gpu_sensors import GpuSensors, open_gpu_sensors

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer

FLUSH_SECONDS = 1.0
"""Maximum delay of rank records in their files: thousands of ranks may share a file system."""


class RankRecords(Callback):
    """Writes the record of each step of this rank, and of the pauses between steps."""

    reads_weights = False
    gpu_sensors: GpuSensors | None = None

    def on_train_start(self, trainer: Trainer) -> None:
        """Open the file, and the sensors of a GPU."""
        trainer.rank_log = open_step_records(trainer)
        try:
            self.gpu_sensors = open_gpu_sensors(trainer.device)
        except UserError as error:  # training needs no sensors
            trainer.progress.log(str(error))

    def on_step_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Write the record of the step, with a sample of the sensors if one is due."""
        if trainer.rank_log is not None and trainer.step_record is not None:
            sample = self.gpu_sensors.sample_if_due() if self.gpu_sensors is not None else None
            if sample is not None:
                trainer.step_record["gpu_sample"] = sample
            trainer.rank_log.write(dict(trainer.step_record))

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Close the file."""
        self._close_log(trainer)

    def on_train_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Close the file."""
        self._close_log(trainer)

    def _close_log(self, trainer: Trainer) -> None:
        if trainer.rank_log is not None:
            trainer.rank_log.close()
            trainer.rank_log = None


def open_step_records(trainer: Trainer) -> Logger:
    """Open this rank's step records, and write their header."""
    file = rank_record_file(trainer.directory, trainer.mesh.rank)
    offset = measure_clock_offset(trainer.device, trainer.run.training.collective_timeout_seconds)
    file.parent.mkdir(exist_ok=True)
    rank_log = JsonLinesLogger(file, trainer.step, FLUSH_SECONDS)
    opening: RunHeader = {
        "format": FORMAT,
        "rank": trainer.mesh.rank,
        "ranks": trainer.mesh.dims.world_size,
        "host": socket.gethostname(),
        "device": trainer.device.type,
        "step": trainer.step,
        "clock_offset_seconds": offset.seconds,
        "clock_error_seconds": offset.error_seconds,
        "memory_bytes": device_memory_bytes(trainer.device),
    }
    if trainer.device.type == "cpu":
        opening["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    rank_log.write(dict(opening))
    return rank_log
