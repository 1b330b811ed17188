"""Decisions of a node's launcher after failures: restart, leave, stop, or continue without a rank."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from phalanx.debug.explain_run import failure_headline
from phalanx.launch.elastic_agent import FailureAction, ProcessFailures
from phalanx.launch.failure_report import UNKNOWN_RANK, FailureCounters, decide, describe_restart, diagnose
from phalanx.launch.failures import describe_failure, find_first_failure, log_failure, read_failures
from phalanx.launch.rendezvous import Rendezvous
from phalanx.runs.checkpoints import CHECKPOINTS_DIR, checkpoints
from phalanx.runs.create import RUN_FILE
from phalanx.runs.events import FAILED, RANK_DROPPED, append_event
from phalanx.spec.errors import EXIT_STOPPED, UserError
from phalanx.spec.layout import Layout
from phalanx.spec.recovery import RecoverySpec

logger = logging.getLogger(__name__)

LayoutChooser = Callable[[int], Layout]
"""Function that returns the layout of a run for a number of ranks. It raises UserError if none fits."""


class FailurePolicy:
    """Restart decisions of a node's launcher: it diagnoses and counts failures, decides, and logs the decision.

    A failure that always occurs at the same step ends the run; failures of a long run that makes progress never
    accumulate.
    """

    def __init__(self, directory: Path, spec: RecoverySpec, rendezvous: Rendezvous) -> None:
        self.directory = directory
        self.restart_limit = spec.max_restarts
        self.has_memory_copies = spec.in_memory_checkpoint_every > 0
        self.num_nodes = rendezvous.max_nodes
        self.is_essential = rendezvous.max_nodes == 1 or rendezvous.is_host
        """True if the others cannot continue without this node: it is the only one, or hosts the rendezvous."""
        self.counters = FailureCounters()
        self.exit_code = 1
        """Exit code of the last failure."""
        self.is_permanent = False
        """True if the last failure would recur."""
        self.last_drop_step = -1
        """Last step reached when a rank was last dropped."""
        self._seen_failures = {_failure_id(record) for record in read_failures(directory)}

    def decide(self, failures: ProcessFailures, kills: int = 0) -> FailureAction:
        """Decide the action after failures of this node's ranks.

        Logs the cause and appends an event. `kills` is the number of ranks killed by the kernel's OOM
        killer.
        """
        if all(failure.exitcode == EXIT_STOPPED for failure in failures.values()):
            self.exit_code = EXIT_STOPPED
            # If one node was stopped, or has joined, the others continue.
            return FailureAction.STOP if self.num_nodes == 1 else FailureAction.RESTART
        records = self.new_failure_records()
        first_failure = find_first_failure(self.directory, failures, kills, records)
        # For a rank that wrote no record, `first_failure` was created just now.
        self._seen_failures.add(_failure_id(first_failure))
        saved_checkpoints = checkpoints(self.directory / CHECKPOINTS_DIR)
        report = diagnose(self.directory, first_failure, records, saved_checkpoints, failures, self.num_nodes)
        counters = self.counters
        repeats_out_of_memory = counters.repeats_out_of_memory(report)
        counters.count(report)
        limit = self.restart_limit
        decision = decide(report, counters, repeats_out_of_memory, limit, self.num_nodes, self.is_essential)
        self.exit_code = decision.exit_code
        self.is_permanent = decision.is_permanent
        headline = failure_headline(self.directory)
        event = {"rank": report.blamed_rank, "step": report.step, "reason": report.reason}
        append_event(self.directory, FAILED, **event, verdict=headline, local=report.is_local)
        if decision.action is FailureAction.RESTART:
            restart = describe_restart(report, counters, saved_checkpoints, self.has_memory_copies, limit)
            logger.warning("%s", "\n  ".join([describe_failure(first_failure), *headline, restart]))
            return decision.action
        log_failure(self.directory, first_failure)
        if repeats_out_of_memory:
            remedy = f"phalanx advise oom {shlex.quote(str(self.directory / RUN_FILE))}"
            logger.info("  the same step would run out of memory again; to find a remedy: %s", remedy)
        return decision.action

    def new_failure_records(self) -> list[dict[str, Any]]:
        """Return the failure records that are new since the last call.

        Clocks are not compared, because they may differ between ranks.
        """
        records = [record for record in read_failures(self.directory) if _failure_id(record) not in self._seen_failures]
        self._seen_failures |= {_failure_id(record) for record in records}
        return records

    def drop_failing_rank(self, nproc: int, choose_layout: LayoutChooser) -> int | None:
        """Drop a rank that is the cause of repeated failures; return the remaining number of ranks.

        On GPUs, the device of that rank is hidden. The result is None if different ranks failed, fewer ranks cannot
        train, or a drop did not help the last time.
        """
        counters = self.counters
        fails_repeatedly = len(counters.suspects) == 1 and counters.local_failures > self.restart_limit > 0
        helped_last_time = self.last_drop_step != counters.last_step_reached
        if self.is_permanent or not fails_repeatedly or not helped_last_time or UNKNOWN_RANK in counters.suspects:
            return None
        (failing_rank,) = counters.suspects
        for ranks in range(nproc - 1, 0, -1):
            with suppress(UserError):
                choose_layout(ranks)
                break
        else:
            return None
        hide_gpu(failing_rank)
        self.last_drop_step = counters.last_step_reached
        counters.local_failures = 0
        counters.suspects = set()
        append_event(self.directory, RANK_DROPPED, rank=failing_rank)
        remaining = f"continuing without it on {ranks} of {nproc} ranks"
        logger.warning("rank %d failed repeatedly; %s", failing_rank, remaining)
        return ranks


def _failure_id(record: Mapping[str, Any]) -> tuple[int, float]:
    return record["rank"], record["time"]


def hide_gpu(rank: int) -> None:
    """Hide the GPU of a local rank from ranks that are started later."""
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible_devices.split(",") if visible_devices else list(map(str, range(torch.cuda.device_count())))
    if devices:
        devices = [device for local_rank, device in enumerate(devices) if local_rank != rank]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
