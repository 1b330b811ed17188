"""Training through failures: a launcher starts its ranks again, with as many as there are, as long as it gets on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from phalanx.debug.explain_run import failure_headline, suspect_ranks
from phalanx.launch.elastic_agent import (
    FailureAction,
    ProcessFailures,
    RunEndedByOtherNode,
    run_until_done,
    stop_signals_as_exit,
)
from phalanx.launch.failures import (
    describe_failure,
    find_first_failure,
    print_failure,
    print_final_failure,
    print_resume_hint,
    read_failures,
)
from phalanx.launch.process import select_device, set_worker_environment
from phalanx.launch.rendezvous import SINGLE_NODE, Rendezvous
from phalanx.launch.shared_memory import allocate_slots
from phalanx.runs.checkpoints import CHECKPOINTS_DIR, checkpoints, is_finished, step_of
from phalanx.runs.events import FAILED, FINISHED, STARTED, append_event, read_events
from phalanx.spec.errors import EXIT_STOPPED, UserError
from phalanx.spec.layout import Layout
from phalanx.spec.recovery import RecoverySpec
from phalanx.spec.run import RunSpec

LayoutChooser = Callable[[int], Layout]
"""The layout of a run for so many ranks. Raises UserError where none fits."""
UNKNOWN_RANK = -1


def supervise_training(
    directory: Path,
    run: RunSpec,
    nproc: int,
    choose: LayoutChooser,
    options: Sequence[str] = (),
    meeting: Rendezvous = SINGLE_NODE,
) -> int:
    """Train the run of a directory with `nproc` ranks on this node, and others' where nodes meet; returns the exit
    code, after saying what failed. `options` are those of phalanx.train. One rank alone that is not to be started again
    takes the process's place, and its memory.

    Raises NotMetError where nodes do not meet, UserError where they cannot, or where too few are left for any layout.
    """
    set_worker_environment(nproc)
    options = ["--device", select_device(run), *options]  # a GPU that is lost must not become a CPU
    alone = nproc == 1 and meeting is SINGLE_NODE
    if alone and not (
        run.recovery.max_restarts or run.recovery.in_memory_checkpoint_every
    ):  # it prints its failure itself
        os.execv(sys.executable, [sys.executable, "-m", "phalanx.train", str(directory), *options])
    if run.recovery.in_memory_checkpoint_every:
        allocate_slots(nproc)
    planned, before = nproc * meeting.max_nodes, len(read_events(directory))
    recovery = FailurePolicy(directory, run.recovery, meeting)

    def words(ranks: int) -> Sequence[str]:
        other = (
            () if ranks == planned else largest_usable_layout(ranks, nproc if meeting is not SINGLE_NODE else 1, choose)
        )
        return "phalanx.train", str(directory), *other, *options

    try:
        with stop_signals_as_exit():
            while not run_until_done(nproc, words, recovery.decide, meeting):
                fewer = recovery.drop_failing_rank(nproc, choose) if meeting is SINGLE_NODE else None
                if fewer is None:
                    if recovery.code not in (2, EXIT_STOPPED):
                        print_resume_hint(directory)
                    return recovery.code
                nproc = fewer
    except (SystemExit, RunEndedByOtherNode) as end:
        if is_finished(directory, run.training.steps):
            return 0
        if isinstance(end, RunEndedByOtherNode):
            print(f"phalanx: {end}", file=sys.stderr)
            return 1
        if (
            words_left := recovery.new_failure_records()
        ):  # it was not stopped in order, unless ranks just lost each other by it
            first = find_first_failure(directory, {}, told=words_left)
            if "lost_peer" not in first:
                return print_final_failure(directory, first)
        if FINISHED not in (event["what"] for event in read_events(directory)[before:]):
            print("phalanx: stopped by a signal while ranks were starting: nothing new is saved", file=sys.stderr)
        raise
    return 0


def largest_usable_layout(ranks: int, each: int, choose: LayoutChooser) -> Sequence[str]:
    """The layout of as many of these ranks as one fits, `each` of a node, as options of phalanx.train; the rest stand
    by.

    Raises UserError where none fits any.
    """
    why: UserError | None = None
    for used in range(ranks, 0, -each):
        try:
            layout = choose(used)
        except UserError as error:
            why = why or error
            continue
        if why is not None:
            print(f"phalanx: {used} of {ranks} ranks train, as no layout fits more: {why}", file=sys.stderr)
        return "--layout", layout.model_dump_json(exclude_defaults=True), "--ranks", str(used)
    assert why is not None
    raise why


class FailurePolicy:
    """A launcher's account of the failures on its node.

    Failures in a row are those without a step won in between: one that always comes at the same step ends the run,
    and those of a long run that goes on never add up.
    """

    def __init__(self, directory: Path, spec: RecoverySpec, meeting: Rendezvous) -> None:
        self.directory, self.restarts, self.copied = directory, spec.max_restarts, spec.in_memory_checkpoint_every > 0
        self.nodes = meeting.max_nodes
        self.alone = meeting.max_nodes == 1 or meeting.is_host
        """Whether the others cannot go on without this node: there are none, or they meet here."""
        self._seen = {_failure_id(word) for word in read_failures(directory)}
        self.last_step_reached = -1
        """The last step that was finished before a failure."""
        self.consecutive_failures = 0
        """Failures that began on this node."""
        self.consecutive_remote_failures = 0
        """Failures in a row that began on other nodes."""
        self.suspect_ranks: set[int] = set()
        """The ranks by which those of this node began; NOBODY where that is not known."""
        self.code = 1
        """Of the last failure."""
        self.final = False
        """Whether whoever failed last would fail again."""
        self.left_out_after = -1
        """`furthest` when a rank was last left out."""

    def decide(self, failures: ProcessFailures, kills: int = 0) -> FailureAction:
        """What follows these failures of ranks of this node, of which the kernel killed some for want of memory; says
        on stderr what happened, and notes it."""
        if all(failure.exitcode == EXIT_STOPPED for failure in failures.values()):
            self.code = EXIT_STOPPED
            return (
                FailureAction.END if self.nodes == 1 else FailureAction.AGAIN
            )  # where one was told to stop, or has come, others go on
        words = self.new_failure_records()
        first = find_first_failure(self.directory, failures, kills, words)
        self._seen.add(_failure_id(first))  # of one without a word it was written down just now
        saved = checkpoints(self.directory / CHECKPOINTS_DIR)
        began = [event["step"] for event in read_events(self.directory) if event["what"] == STARTED]
        step = max([*(word.get("step", 0) for word in words), *map(step_of, saved[:1]), *began[-1:]], default=0)
        if step > self.last_step_reached:
            self.last_step_reached, self.consecutive_failures, self.consecutive_remote_failures, self.suspect_ranks = (
                step,
                0,
                0,
                set(),
            )
        # NCCL aborts those whose peers are gone.
        lost = "lost_peer" in first or first["reason"].startswith("was killed by SIGABRT")
        here = self.nodes == 1 or (first["rank"] in failures and not lost)
        self.consecutive_failures, self.consecutive_remote_failures = (
            self.consecutive_failures + here,
            self.consecutive_remote_failures + (not here),
        )
        blamed = suspect_ranks(self.directory) if lost else {first["rank"]}
        self.suspect_ranks |= (blamed or {UNKNOWN_RANK}) if here else set()
        self.code = int(first["code"])
        verdict = failure_headline(self.directory)
        # A node that is gone notes nothing.
        reason = first["reason"] if here or not lost else "lost ranks of another node"
        rank = [*first.get("suspect_ranks", ()), first["rank"]][0]
        append_event(self.directory, FAILED, rank=rank, step=step, reason=reason, verdict=verdict, here=here)
        self.final = "lost_peer" not in first and (first["code"] == 2 or first.get("final", False))
        if (
            self.final
            or self.consecutive_failures > self.restarts
            or self.consecutive_remote_failures > self.restarts * self.nodes
        ):
            print_failure(self.directory, first)
            leaves = here and not self.final and self.restarts > 0 and not self.alone
            return FailureAction.LEAVE if leaves else FailureAction.END
        source, count = (
            saved[0].name if saved else "the beginning",
            f" ({self.consecutive_failures} of {self.restarts} in a row)",
        )
        if self.copied:
            source += ", or copies that are newer"
        elif saved and step > step_of(saved[0]):
            source += f", {step - step_of(saved[0])} steps before"
        lines = f"phalanx: {describe_failure(first)}", *verdict, f"starting again from {source}{count if here else ''}"
        print("\n  ".join(lines), file=sys.stderr)
        return FailureAction.AGAIN

    def new_failure_records(self) -> list[dict[str, Any]]:
        """What ranks left word of since this was asked before. (Not by their clocks, which may differ.)"""
        words = [word for word in read_failures(self.directory) if _failure_id(word) not in self._seen]
        self._seen |= {_failure_id(word) for word in words}
        return words

    def drop_failing_rank(self, nproc: int, choose: LayoutChooser) -> int | None:
        """So many ranks to go on with, where it was always the same that was to blame and fewer can train; None where
        that cannot help, or did not the last time. On a GPU, the device of that rank is left out."""
        again_and_again = len(self.suspect_ranks) == 1 and self.consecutive_failures > self.restarts > 0
        if (
            self.final
            or not again_and_again
            or UNKNOWN_RANK in self.suspect_ranks
            or self.left_out_after == self.last_step_reached
        ):
            return None
        (worst,) = self.suspect_ranks
        for ranks in range(nproc - 1, 0, -1):
            with suppress(UserError):
                choose(ranks)
                break
        else:
            return None
        hide_gpu(worst)
        self.left_out_after, self.consecutive_failures, self.suspect_ranks = self.last_step_reached, 0, set()
        append_event(self.directory, "rank_dropped", rank=worst)
        print(
            f"phalanx: going on without rank {worst}, which failed again and again: with {ranks} of {nproc}",
            file=sys.stderr,
        )
        return ranks


def _failure_id(word: Mapping[str, Any]) -> tuple[int, float]:
    return word["rank"], word["time"]


def hide_gpu(rank: int) -> None:
    """Hide the GPU of a local rank from those that are started from now on."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(device for at, device in enumerate(devices) if at != rank)
