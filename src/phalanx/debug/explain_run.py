"""Diagnosis of a run's failures from the records of its ranks and its earlier events."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from phalanx.debug.collective_order import CollectiveOrder
from phalanx.debug.hang_analysis import diagnose_hang
from phalanx.debug.hang_messages import MISMATCH_FIXES, Explanation, Verdict
from phalanx.runs.checkpoints import CHECKPOINTS_DIR, checkpoints
from phalanx.runs.create import RUN_FILE
from phalanx.runs.decode import unreadable_file
from phalanx.runs.events import (
    FINISHED,
    LIFECYCLE_EVENTS,
    STARTED,
    describe_damaged_checkpoints,
    describe_failures,
    describe_rollbacks,
    mtime_or_none,
    read_events,
)
from phalanx.runs.hang_dumps import (
    HANGS_DIR,
    HangDump,
    describe_fault,
    failure_file,
    fault_file,
    read_dumps,
    read_failures,
)
from phalanx.runs.lock import is_running
from phalanx.runs.step_records import TRACE_DIR
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run, with_last_used_layout
from phalanx.spec.files.teacher import with_kept_teacher
from phalanx.spec.parallel_dims import ParallelDims, parallel_dims
from phalanx.spec.run import RunSpec


@dataclass(frozen=True, kw_only=True)
class RunRecords:
    """Records of failures by the ranks and launchers of a run."""

    dumps: dict[int, HangDump]
    failures: dict[int, dict[str, Any]]
    events: list[Mapping[str, Any]]
    problems: list[str]
    """Damaged files."""

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read the records of a run directory."""
        problems: list[str] = []
        dumps = read_dumps(directory, problems)
        failures = read_failures(directory, problems)
        return cls(dumps=dumps, failures=failures, events=read_events(directory, problems), problems=problems)

    @property
    def world_size(self) -> int:
        """The number of ranks of the last start, and at least one more than the highest rank with a record."""
        dumped = [dump["ranks"] for dump in self.dumps.values()]
        started: list[int] = [event["ranks"] for event in self.events if event["kind"] == STARTED]
        return max([max(self.failures, default=0) + 1, *(dumped or started[-1:])])

    @property
    def earlier_failures(self) -> list[str]:
        """A line on each failure, rollback and damaged checkpoint, without the present failure."""
        return [
            *describe_failures(self.events, exclude_last=bool(self.dumps or self.failures)),
            *describe_rollbacks(self.events),
            *describe_damaged_checkpoints(self.events),
        ]


def explain_run(directory: Path) -> Explanation:
    """Return why a run hung or failed, the last time and before.

    Raises UserError if the directory is not a run directory.
    """
    run = with_last_used_layout(load_run(directory / RUN_FILE, environment={}), directory)
    run = with_kept_teacher(run, directory)
    records = RunRecords.read(directory)
    try:
        sizes = parallel_dims(run.layout, records.world_size)
    except UserError:
        # The number of ranks is unknown before a first step.
        sizes = ParallelDims(dp_replicate=records.world_size)
    explanation = diagnose_hang(records.dumps, records.failures, sizes)
    if explanation.verdict.kind == "nothing":
        explanation = replace(explanation, verdict=_judge_without_dumps(directory, run, records))
    # Logs exist only if the order of collectives was checked.
    logs = {file.stem.removeprefix("rank-"): file for file in (directory / HANGS_DIR).glob("rank-*.calls")}
    order = CollectiveOrder({int(rank): file for rank, file in logs.items() if rank.isdecimal()})
    difference = order.first_difference()
    if difference is not None and explanation.verdict.kind not in ("mismatch", "killed", "stopped"):
        verdict = Verdict(difference.kind, difference.ranks, difference.message, fix=MISMATCH_FIXES["operation"])
        explanation = replace(explanation, verdict=verdict)
    return replace(
        explanation,
        earlier_failures=tuple(sorted(records.earlier_failures)),
        problems=(*records.problems, *map(unreadable_file, order.damaged_files)),
    )


def failure_headline(directory: Path) -> list[str]:
    """Return the diagnosis of a failed run, or no lines if the first failure's reason explains it."""
    with suppress(UserError):
        explanation = explain_run(directory)
        if explanation.verdict.kind not in ("killed", "error", "nothing"):
            return [f"why: {explanation.verdict.summary}", f"details: phalanx debug {directory}"]
    return []


def suspect_ranks(directory: Path) -> set[int]:
    """Return the ranks that caused a failure, or no ranks if the records contain only lost connections."""
    with suppress(UserError):
        verdict = explain_run(directory).verdict
        return set(verdict.ranks) if verdict.kind != "nothing" else set()
    return set()


def _judge_without_dumps(directory: Path, run: RunSpec, records: RunRecords) -> Verdict:
    """Return the verdict on a run of which no rank reported a pending collective."""
    if records.failures:
        rank, first_failure = min(
            records.failures.items(), key=lambda rank_and_record: float(rank_and_record[1]["time"])
        )
        fix = f"read {failure_file(directory, rank)}"
        return Verdict("nothing", (rank,), f"rank {rank} failed: {first_failure['reason']}", fix=fix)
    if is_running(directory):
        summary = "the run is active, and no rank has hung since it started"
        written_at = [*filter(None, map(mtime_or_none, (directory / TRACE_DIR).glob("rank-*.jsonl")))]
        if written_at:
            summary += f"; the last step was recorded {time.time() - max(written_at):.0f} s ago"
        timeout_seconds = run.training.collective_timeout_seconds
        return Verdict("nothing", (), summary, fix=f"wait: a hung rank writes its stack within {timeout_seconds:g} s")
    lifecycle_events = [event for event in records.events if event["kind"] in LIFECYCLE_EVENTS]
    last_event: Mapping[str, Any] = lifecycle_events[-1] if lifecycle_events else {"kind": None}
    if last_event["kind"] == STARTED:
        # The run left neither an end nor failure records.
        faults = {rank: describe_fault(directory, rank) for rank in range(last_event["ranks"])}
        killed_ranks = tuple(rank for rank, fault in faults.items() if fault)
        if not killed_ranks:
            summary = "the run ended without a record: its launcher was killed, or the machine stopped"
            return Verdict("nothing", (), summary, fix=_advise_resume(directory))
        summary = "; ".join(f"rank {rank} was killed by a signal: {faults[rank]}" for rank in killed_ranks)
        fix = f"read {fault_file(directory, killed_ranks[0])}; {_advise_resume(directory)}"
        return Verdict("killed", killed_ranks, summary, fix=fix)
    summary = "the run is not known to be active, and no rank reported a pending collective"
    if last_event["kind"] == FINISHED:
        last_step = last_event["step"]
        if last_step < run.training.steps:
            summary = f"the run was stopped cleanly after step {last_step} of {run.training.steps_text}"
            return Verdict("nothing", (), summary, fix=_advise_resume(directory))
        summary = f"the run finished after step {last_step}"
    return Verdict("nothing", (), summary, fix=f"run phalanx report {directory} for a summary")


def _advise_resume(directory: Path) -> str:
    has_checkpoint = bool(checkpoints(directory / CHECKPOINTS_DIR))
    purpose = "to continue" if has_checkpoint else "to start over from step 0: there is no checkpoint yet"
    return f"run phalanx train {directory} --resume {purpose}"
