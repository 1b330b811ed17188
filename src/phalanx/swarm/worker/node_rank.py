"""One rank of a node, from its start in the node's directory to its exit."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import IO

import torch.distributed as dist

from phalanx.launch.failures import write_failure
from phalanx.launch.process import LAUNCHER_PID_ENV, env_rank, handling_signals, init_distributed, select_device
from phalanx.runs.create import read_run_directory
from phalanx.runs.lock import acquire_run_lock
from phalanx.runs.swarm_records import ROUNDS_FILE, read_link
from phalanx.spec.errors import UserError
from phalanx.swarm.coordinator.update_checks import UpdateRejected
from phalanx.swarm.rpc.client import SwarmClient
from phalanx.swarm.rpc.link_errors import rejection_error
from phalanx.swarm.worker.worker import SwarmWorker
from phalanx.train.guards.collective_log import OrderGuard
from phalanx.train.loggers import JsonLinesLogger, Logger, open_loggers
from phalanx.train.training_data import open_training_data

logger = logging.getLogger(__name__)


class NodeRank:
    """A rank of a node. Only rank 0 locks the directory, connects to the coordinator, and writes the logs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lock: IO[str] | None = None
        self.link: SwarmClient | None = None
        self.worker: SwarmWorker | None = None

    def run(self) -> None:
        """Train until the last round is done, or until a signal."""
        worker = self._start_worker()
        loggers: list[Logger] = []
        round_logger = None
        if self.link is not None:
            loggers = open_loggers(self.directory, 0)
            round_logger = JsonLinesLogger(self.directory / ROUNDS_FILE, worker.run.training.steps)
            self.link.join(**self.link.join_message)
        # A node that receives a signal leaves after its round.
        with handling_signals(lambda _: worker.leave()), OrderGuard(self.directory):
            evaluation = worker.participate(loggers, round_logger)
        for metrics_logger in loggers:
            metrics_logger.write(evaluation)
            metrics_logger.close()
        if self.link is not None:
            self.link.leave()
            if self.lock is not None:
                self.lock.close()
            end = "left the swarm; the same command rejoins" if worker.leaving else "the last round is done"
            loss = evaluation.get("held_out_loss")
            logger.info("%s", end if loss is None else f"{end}; held-out loss {loss:.4f}")

    def _start_worker(self) -> SwarmWorker:
        """Initialize torch.distributed and this rank's worker; on rank 0 also lock the directory and connect."""
        run, data = read_run_directory(self.directory)
        link_record = read_link(self.directory)
        device = init_distributed(select_device(run), run.training.collective_timeout_seconds)
        if not dist.is_initialized() or dist.get_rank() == 0:
            self.lock = acquire_run_lock(self.directory)
            self.link = SwarmClient(link_record["address"], Path(link_record["certificates"]))
            self.link.join_message = dict(link_record["place"])
        text = open_training_data(run, data)
        worker = SwarmWorker(run, text, self.directory, device, name=link_record["node"], link=self.link)
        worker.exchange.version = link_record["version"]
        worker.exchange.initial_download_bytes = link_record["received_bytes"]
        self.worker = worker
        return worker

    def fail(self, error: BaseException) -> int:
        """Record an error, leave the swarm, and return the exit code."""
        if isinstance(error, UpdateRejected) and self.link is not None:
            error = rejection_error(self.link.address, error)
        trainer = self.worker.trainer if self.worker is not None else None
        write_failure(self.directory, env_rank(), trainer.step if trainer is not None else 0, error=error)
        if self.link is not None:
            self.link.leaving = True
            # The link may have failed.
            with suppress(Exception):
                self.link.leave()
        if LAUNCHER_PID_ENV not in os.environ:
            logger.error("%s", error, exc_info=not isinstance(error, UserError))
        return 2 if isinstance(error, UserError) else 1
