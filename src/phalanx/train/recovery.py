"""Training through failures: a launcher starts its ranks again, with as many as there are, as long as it gets on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from phalanx.measure.events import FAILED, note
from phalanx.measure.hang import headline
from phalanx.measure.incident import dump_file
from phalanx.spec.errors import UserError
from phalanx.spec.layout import Layout
from phalanx.spec.run import RunSpec
from phalanx.train.agent import ALONE, Failures, Meeting, Then, run_ranks, stoppable
from phalanx.train.copies import offer_memory
from phalanx.train.launch import first_failure, last_step, report, said_of, set_environment
from phalanx.train.manifest import checkpoints, reached, step_of
from phalanx.train.setup import STOPPED

Choose = Callable[[int], Layout]
"""The layout of a run for so many ranks. Raises UserError where none fits."""


def train_through(
    directory: Path, run: RunSpec, nproc: int, choose: Choose, options: Sequence[str] = (), meeting: Meeting = ALONE
) -> int:
    """Train the run of a directory with `nproc` ranks on this node, and others' where nodes meet; returns the exit
    code, after saying what failed. `options` are those of phalanx.train. One rank alone takes the process's place.

    Raises UserError where nodes do not meet, or where too few are left for any layout.
    """
    set_environment(nproc)
    if nproc == 1 and meeting is ALONE:  # nobody stays behind to read its failure: it prints that itself
        os.execv(sys.executable, [sys.executable, "-m", "phalanx.train", str(directory), *options])
    if run.recovery.copy_every:
        offer_memory(nproc)
    planned = nproc * meeting.most
    recovery = Recovery(directory, run.recovery.restarts, meeting.most)

    def words(ranks: int) -> Sequence[str]:
        other = () if ranks == planned else as_many(ranks, nproc if meeting is not ALONE else 1, choose)
        return "phalanx.train", str(directory), *other, *options

    try:
        with stoppable():
            while not run_ranks(nproc, words, recovery.judge, meeting):
                fewer = recovery.without_the_worst(nproc, choose) if meeting is ALONE else None
                if fewer is None:
                    return recovery.code
                nproc = fewer
    except SystemExit:
        if not reached(directory, run.training.steps):
            raise
    return 0


def as_many(ranks: int, each: int, choose: Choose) -> Sequence[str]:
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


class Recovery:
    """A launcher's account of the failures on its node.

    Failures in a row are those without a step won in between: one that always comes at the same step ends the run,
    and those of a long run that goes on never add up.
    """

    def __init__(self, directory: Path, restarts: int, nodes: int) -> None:
        self.directory, self.restarts, self.nodes = directory, restarts, nodes
        self.began = time.time()
        self.furthest = -1
        """The last step that was finished before a failure."""
        self.in_a_row = 0
        """Failures that began on this node."""
        self.elsewhere = 0
        """Failures in a row that began on other nodes."""
        self.culprits: set[int] = set()
        """The ranks that those of this node began with."""
        self.code = 1
        """Of the last failure."""
        self.final = False
        """Whether whoever failed last would fail again."""
        self.left_out_after = -1
        """`furthest` when a rank was last left out."""

    def judge(self, failures: Failures) -> Then:
        """What follows these failures of ranks of this node; says on stderr what happened, and notes it."""
        if all(failure.exitcode == STOPPED for failure in failures.values()):
            return Then.AGAIN  # a node was told to stop, or one has come: those that stay go on
        first = first_failure(self.directory, failures, self.began)
        saved = checkpoints(self.directory / "checkpoints")
        step = max(last_step(self.directory, self.began), step_of(saved[0]) if saved else 0)
        self.began = time.time()
        if step > self.furthest:
            self.furthest, self.in_a_row, self.elsewhere, self.culprits = step, 0, 0, set()
        here = self.nodes == 1 or (first["rank"] in failures and "lost" not in first)
        self.in_a_row, self.elsewhere = self.in_a_row + here, self.elsewhere + (not here)
        self.culprits |= {first["rank"]} if here else set()
        self.code = int(first["code"])
        verdict = headline(self.directory)
        if here:
            note(self.directory, FAILED, rank=first["rank"], step=step, reason=first["reason"], verdict=verdict)
        self.final = first["code"] == 2 or first.get("final", False)
        if self.final or self.in_a_row > self.restarts or self.elsewhere > self.restarts * self.nodes:
            report(self.directory, first)
            return Then.END if self.final or self.nodes == 1 or not here else Then.LEAVE
        source, count = saved[0].name if saved else "the beginning", f" ({self.in_a_row} of {self.restarts} in a row)"
        lines = f"phalanx: {said_of(first)}", *verdict, f"starting again from {source}{count if here else ''}"
        print("\n  ".join(lines), file=sys.stderr)
        for rank in failures:  # what is written of the next failure must not be held against words of this one
            dump_file(self.directory, rank).unlink(missing_ok=True)
        return Then.AGAIN

    def without_the_worst(self, nproc: int, choose: Choose) -> int | None:
        """So many ranks to go on with, where it was always the same that failed first and fewer can train; None where
        that cannot help, or did not the last time. On a GPU, the device of that rank is left out."""
        again_and_again = len(self.culprits) == 1 and self.in_a_row > self.restarts > 0
        if self.final or not again_and_again or self.left_out_after == self.furthest:
            return None
        (worst,) = self.culprits
        for ranks in range(nproc - 1, 0, -1):
            with suppress(UserError):
                choose(ranks)
                break
        else:
            return None
        leave_out_device(worst)
        self.left_out_after, self.in_a_row, self.culprits = self.furthest, 0, set()
        note(self.directory, "left out", rank=worst)
        print(f"phalanx: going on without rank {worst}, which failed again and again: {ranks} ranks", file=sys.stderr)
        return ranks


def leave_out_device(rank: int) -> None:
    """Hide the GPU of a local rank from those that are started from now on."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(device for at, device in enumerate(devices) if at != rank)
