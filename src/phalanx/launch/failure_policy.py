"""Decisions of a node's launcher after failures: restart, leave, stop, or continue without a rank."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from phalanx.debug.explain_run import failure_headline, suspect_ranks
from phalanx.launch.elastic_agent import FailureAction, ProcessFailures
from phalanx.launch.failures import describe_failure, find_first_failure, print_failure, read_failures
from phalanx.launch.rendezvous import Rendezvous
from phalanx.runs.checkpoints import CHECKPOINTS_DIR, checkpoints, step_of
from phalanx.runs.create import RUN_FILE
from phalanx.runs.events import FAILED, RANK_DROPPED, STARTED, append_event, read_events
from phalanx.spec.errors import EXIT_STOPPED, UserError
from phalanx.spec.formatting import plural
from phalanx.spec.layout import Layout
from phalanx.spec.recovery import RecoverySpec

LayoutChooser = Callable[[int], Layout]
"""Function that returns the layout of a run for a number of ranks. It raises UserError if none fits."""
UNKNOWN_RANK = -1


class FailurePolicy:
    """Failure counters and restart decisions of a node's launcher.

    Consecutive failures are those without a completed step between them. A failure that always occurs at the same step
    ends the run; failures of a long run that makes progress never accumulate.
    """

    def __init__(self, directory: Path, spec: RecoverySpec, rendezvous: Rendezvous) -> None:
        self.directory = directory
        self.restart_limit = spec.max_restarts
        self.has_memory_copies = spec.in_memory_checkpoint_every > 0
        self.nodes = rendezvous.max_nodes
        self.is_essential = rendezvous.max_nodes == 1 or rendezvous.is_host
        """True if the others cannot continue without this node: it is the only one, or hosts the rendezvous."""
        self._seen_failures = {_failure_id(record) for record in read_failures(directory)}
        self.last_step_reached = -1
        """Last finished step before a failure."""
        self.last_out_of_memory_step = -1
        """Last finished step before an out-of-memory failure."""
        self.consecutive_failures = 0
        """Consecutive failures that started on this node."""
        self.consecutive_remote_failures = 0
        """Consecutive failures that started on other nodes."""
        self.suspect_ranks: set[int] = set()
        """Ranks in which this node's failures started; UNKNOWN_RANK if unknown."""
        self.code = 1
        """Exit code of the last failure."""
        self.is_permanent = False
        """True if the last failure would recur."""
        self.last_drop_step = -1
        """`last_step_reached` when a rank was last dropped."""

    def decide(self, failures: ProcessFailures, kills: int = 0) -> FailureAction:
        """Decide the action after failures of this node's ranks.

        Prints the cause to stderr and appends an event. `kills` is the number of ranks killed by the kernel's OOM
        killer.
        """
        if all(failure.exitcode == EXIT_STOPPED for failure in failures.values()):
            self.code = EXIT_STOPPED
            # If one node was stopped, or has joined, the others continue.
            return FailureAction.STOP if self.nodes == 1 else FailureAction.RESTART
        records = self.new_failure_records()
        first_failure = find_first_failure(self.directory, failures, kills, records=records)
        self._seen_failures.add(_failure_id(first_failure))  # the record of a rank that wrote none was created just now
        saved = checkpoints(self.directory / CHECKPOINTS_DIR)
        start_steps = [event["step"] for event in read_events(self.directory) if event["what"] == STARTED]
        record_steps = [record.get("step", 0) for record in records]
        step = max([*record_steps, *map(step_of, saved[:1]), *start_steps[-1:]], default=0)
        # NCCL aborts ranks whose peers are lost.
        lost_peer = "lost_peer" in first_failure or first_failure["reason"].startswith("was killed by SIGABRT")
        is_local = self.nodes == 1 or (first_failure["rank"] in failures and not lost_peer)
        suspects = suspect_ranks(self.directory) if lost_peer else {first_failure["rank"]}
        is_out_of_memory_again = "out_of_memory" in first_failure and self._is_same_step_again(
            step, start_steps, records
        )
        self._count_failure(step, is_local, suspects or {UNKNOWN_RANK})
        self.code = 2 if is_out_of_memory_again else int(first_failure["code"])
        headline = failure_headline(self.directory)
        # A lost node records nothing.
        reason = first_failure["reason"] if is_local or not lost_peer else "lost the ranks of another node"
        rank = [*first_failure.get("suspect_ranks", ()), first_failure["rank"]][0]
        append_event(self.directory, FAILED, rank=rank, step=step, reason=reason, verdict=headline, here=is_local)
        cannot_recover = self.code == 2 or first_failure.get("final", False)
        self.is_permanent = "lost_peer" not in first_failure and cannot_recover
        if self.is_permanent or self._has_used_up_restarts():
            print_failure(self.directory, first_failure)
            if is_out_of_memory_again:
                run_file = shlex.quote(str(self.directory / RUN_FILE))
                print(
                    f"  the same step would run out of memory again; to find a remedy: phalanx advise oom {run_file}",
                    file=sys.stderr,
                )
            is_of_this_node = is_out_of_memory_again or "storage" in first_failure or not self.is_permanent
            should_leave = is_local and is_of_this_node and self.restart_limit > 0 and not self.is_essential
            self.code = 1 if should_leave else self.code
            return FailureAction.LEAVE if should_leave else FailureAction.STOP
        count_text = f" (consecutive failure {self.consecutive_failures} of {self.restart_limit})" if is_local else ""
        restart = f"restarting from {self._resume_source(saved, step)}{count_text}"
        lines = (f"phalanx: {describe_failure(first_failure)}", *headline, restart)
        print("\n  ".join(lines), file=sys.stderr)
        return FailureAction.RESTART

    def _is_same_step_again(self, step: int, start_steps: Sequence[int], records: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether memory would be insufficient again.

        It was insufficient in the very first step, or twice in one step. (After a restart, other processes may still
        have occupied it.)
        """
        is_first_start = self.last_step_reached < 0
        failed_in_first_step = is_first_start and any(record.get("step") in start_steps[-1:] for record in records)
        last_step, self.last_out_of_memory_step = self.last_out_of_memory_step, step
        return failed_in_first_step or step == last_step

    def _count_failure(self, step: int, is_local: bool, suspects: set[int]) -> None:
        """Count a consecutive failure.

        If the run got further than at the last failure, the counters restart.
        """
        if step > self.last_step_reached:
            self.last_step_reached = step
            self.consecutive_failures = self.consecutive_remote_failures = 0
            self.suspect_ranks = set()
        if is_local:
            self.consecutive_failures += 1
            self.suspect_ranks |= suspects
        else:
            self.consecutive_remote_failures += 1

    def _has_used_up_restarts(self) -> bool:
        allowed_remote = self.restart_limit * self.nodes
        return self.consecutive_failures > self.restart_limit or self.consecutive_remote_failures > allowed_remote

    def _resume_source(self, saved: list[Path], step: int) -> str:
        """Return a phrase for the point from which the ranks restart."""
        source = saved[0].name if saved else "the beginning"
        if self.has_memory_copies:
            return source + " or newer copies in memory"
        steps_back = step - step_of(saved[0]) if saved else 0
        return source + (f", losing {plural(steps_back, 'step')}" if steps_back > 0 else "")

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
        fails_repeatedly = len(self.suspect_ranks) == 1 and self.consecutive_failures > self.restart_limit > 0
        if (
            self.is_permanent
            or not fails_repeatedly
            or UNKNOWN_RANK in self.suspect_ranks
            or self.last_drop_step == self.last_step_reached
        ):
            return None
        (failing_rank,) = self.suspect_ranks
        for ranks in range(nproc - 1, 0, -1):
            with suppress(UserError):
                choose_layout(ranks)
                break
        else:
            return None
        hide_gpu(failing_rank)
        self.last_drop_step = self.last_step_reached
        self.consecutive_failures = 0
        self.suspect_ranks = set()
        append_event(self.directory, RANK_DROPPED, rank=failing_rank)
        print(
            f"phalanx: rank {failing_rank} failed repeatedly; continuing without it on {ranks} of {nproc} ranks",
            file=sys.stderr,
        )
        return ranks


def _failure_id(record: Mapping[str, Any]) -> tuple[int, float]:
    return record["rank"], record["time"]


def hide_gpu(rank: int) -> None:
    """Hide the GPU of a local rank from ranks that are started later."""
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = (
        visible_devices.split(",") if visible_devices else [str(index) for index in range(torch.cuda.device_count())]
    )
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(
            device for local_rank, device in enumerate(devices) if local_rank != rank
        )
