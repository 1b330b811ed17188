"""Diagnosis, counters and decision after a failure of ranks, without side effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.debug.explain_run import suspect_ranks
from phalanx.launch.elastic_agent import FailureAction
from phalanx.runs.checkpoints import step_of
from phalanx.runs.events import STARTED, read_events
from phalanx.spec.formatting import plural

UNKNOWN_RANK = -1


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """Failure of a node's ranks, as the node knows it."""

    first_failure: Mapping[str, Any]
    """Record of the first failure."""
    step: int
    """Last step that is known to be finished."""
    is_local: bool
    """True if the failure started on this node."""
    lost_peer: bool
    """True if the rank failed because it lost another rank."""
    suspects: frozenset[int]
    """Ranks in which the failure started; UNKNOWN_RANK if unknown."""
    in_first_step: bool
    """True if a rank failed before it finished a step since the last start."""

    @property
    def reason(self) -> str:
        """The reason to record. A lost node records nothing."""
        return self.first_failure["reason"] if self.is_local or not self.lost_peer else "lost the ranks of another node"

    @property
    def blamed_rank(self) -> int:
        """The rank to name: the first suspect of the record, or the rank that wrote it."""
        return [*self.first_failure.get("suspect_ranks", ()), self.first_failure["rank"]][0]


def diagnose(
    directory: Path,
    first_failure: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    saved_checkpoints: Sequence[Path],
    local_ranks: Mapping[int, Any],
    num_nodes: int,
) -> FailureReport:
    """Return the report of a failure.

    `first_failure` is its first record, and `records` are all records since the last failure. `saved_checkpoints` come
    newest first, and `local_ranks` are the ranks of this node that failed.
    """
    start_steps = [event["step"] for event in read_events(directory) if event["kind"] == STARTED][-1:]
    record_steps = [record.get("step", 0) for record in records]
    # NCCL aborts ranks whose peers are lost.
    lost_peer = "lost_peer" in first_failure or first_failure["reason"].startswith("was killed by SIGABRT")
    suspects = suspect_ranks(directory) if lost_peer else {first_failure["rank"]}
    return FailureReport(
        first_failure=first_failure,
        step=max([*record_steps, *map(step_of, saved_checkpoints[:1]), *start_steps], default=0),
        is_local=num_nodes == 1 or (first_failure["rank"] in local_ranks and not lost_peer),
        lost_peer=lost_peer,
        suspects=frozenset(suspects or {UNKNOWN_RANK}),
        in_first_step=any(record.get("step") in start_steps for record in records),
    )


@dataclass(kw_only=True)
class FailureCounters:
    """Counts of consecutive failures, between which no step was completed."""

    last_step_reached: int = -1
    """Last finished step before a failure."""
    last_out_of_memory_step: int = -1
    """Last finished step before an out-of-memory failure."""
    local_failures: int = 0
    """Consecutive failures that started on this node."""
    remote_failures: int = 0
    """Consecutive failures that started on other nodes."""
    suspects: set[int] = field(default_factory=set)
    """Ranks in which this node's failures started."""

    def repeats_out_of_memory(self, report: FailureReport) -> bool:
        """Return whether memory was insufficient in the very first step, or twice in one step.

        Call it once per failure, before `count`. After a restart, other processes may still occupy memory.
        """
        if "out_of_memory" not in report.first_failure:
            return False
        is_first_start = self.last_step_reached < 0
        is_repeated = report.step == self.last_out_of_memory_step
        self.last_out_of_memory_step = report.step
        return (is_first_start and report.in_first_step) or is_repeated

    def count(self, report: FailureReport) -> None:
        """Count a failure; a run that got further than at the last failure starts to count again."""
        if report.step > self.last_step_reached:
            self.last_step_reached = report.step
            self.local_failures = self.remote_failures = 0
            self.suspects = set()
        if report.is_local:
            self.local_failures += 1
            self.suspects |= report.suspects
        else:
            self.remote_failures += 1


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The action after a failure."""

    action: FailureAction
    exit_code: int
    """Exit code of the launcher, if the run does not continue on this node."""
    is_permanent: bool
    """True if the failure would recur."""


def decide(
    report: FailureReport,
    counters: FailureCounters,
    repeats_out_of_memory: bool,
    restart_limit: int,
    num_nodes: int,
    is_essential: bool,
) -> Decision:
    """Decide what follows a failure.

    A failure that would recur ends the run, and so do too many consecutive failures. If the cause is in this node
    alone, this node leaves instead, and the others continue. `counters` include this failure. `is_essential`: the other
    nodes cannot continue without this node.
    """
    exit_code = 2 if repeats_out_of_memory else int(report.first_failure["code"])
    is_final = exit_code == 2 or report.first_failure.get("final", False)
    is_permanent = is_final and "lost_peer" not in report.first_failure
    is_used_up = counters.local_failures > restart_limit or counters.remote_failures > restart_limit * num_nodes
    if not (is_permanent or is_used_up):
        return Decision(action=FailureAction.RESTART, exit_code=exit_code, is_permanent=False)
    is_node_at_fault = repeats_out_of_memory or "storage" in report.first_failure or not is_permanent
    if report.is_local and is_node_at_fault and restart_limit > 0 and not is_essential:
        return Decision(action=FailureAction.LEAVE, exit_code=1, is_permanent=is_permanent)
    return Decision(action=FailureAction.STOP, exit_code=exit_code, is_permanent=is_permanent)


def describe_restart(
    report: FailureReport,
    counters: FailureCounters,
    saved_checkpoints: Sequence[Path],
    has_memory_copies: bool,
    restart_limit: int,
) -> str:
    """Describe from where the ranks restart, and how often they have.

    `counters` include this failure; `saved_checkpoints` come newest first.
    """
    source = saved_checkpoints[0].name if saved_checkpoints else "the beginning"
    lost_steps = report.step - step_of(saved_checkpoints[0]) if saved_checkpoints else 0
    if has_memory_copies:
        source += " or newer copies in memory"
    elif lost_steps > 0:
        source += f", losing {plural(lost_steps, 'step')}"
    count = f" (consecutive failure {counters.local_failures} of {restart_limit})" if report.is_local else ""
    return f"restarting from {source}{count}"
