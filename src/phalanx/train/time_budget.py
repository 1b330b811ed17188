"""`training.seconds`: how many steps fit into a time, decided when the first of them have been measured."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from phalanx.parallel.comm.objects import broadcast_from_rank0
from phalanx.runs.create import read_run_directory, rewrite_run_file
from phalanx.spec.errors import UserError
from phalanx.spec.run import RunSpec
from phalanx.train.progress import ProgressDisplay
from phalanx.train.resumable import ResumableLearner

DECISION_STEPS = 10
"""Steps to measure, or fewer where they take more than DECISION_SHARE of the time."""
DECISION_SHARE = 0.2
WARM_UP_STEPS = 2
"""First steps that may be slower than those after them."""
MIN_STEPS = 3


def steps_in_time(seconds: float, first_step: int, ends: Sequence[float]) -> int | None:
    """Return how many steps a run has that may train for `seconds`; None before enough of them are measured.

    Args:
        seconds: The time of the whole run.
        first_step: Steps that were done before the time began.
        ends: When each step since then ended, in seconds. The steps to come are taken to be as fast as the median of
            these, without the first two.

    Raises:
        UserError: There is no time for three steps.
    """
    done = len(ends)
    if ends[-1] > seconds and first_step + done <= MIN_STEPS:
        step_seconds = ends[-1] / done
        raise UserError(
            "training.seconds",
            seconds,
            f"is too short for {MIN_STEPS} steps, each of which takes {step_seconds:.2g} s here",
            f"use at least {math.ceil((MIN_STEPS + 1) * step_seconds)}, or training.steps in its place",
        )
    if done <= WARM_UP_STEPS or (done < DECISION_STEPS and ends[-1] < DECISION_SHARE * seconds):
        return None
    step_seconds = median(end - start for start, end in pairwise(ends[WARM_UP_STEPS - 1 :]))
    return first_step + done + math.floor(max(0.0, seconds - ends[-1]) / step_seconds)


def with_decided_steps(run: RunSpec, steps: int) -> RunSpec:
    """Return the run with a number of steps in place of its seconds. It warms up for at most half of them."""
    warmup_steps = min(run.optimizer.warmup_steps, steps // 2)
    return run.model_copy(
        update={
            "training": run.training.replace(steps=steps, seconds=None),
            "optimizer": run.optimizer.replace(warmup_steps=warmup_steps),
        }
    )


class TimeBudget:
    """The time of a run that has `training.seconds`, from which its steps are decided; nothing for other runs."""

    def __init__(self, learner: ResumableLearner) -> None:
        self.learner, self.started_at, self.first_step = learner, time.perf_counter(), learner.step
        self.ends: list[float] = []
        """When each step ended, in seconds by the clock of rank 0."""

    def end_step(self, progress: ProgressDisplay) -> None:
        """Note that a step has ended, and decide how many there are once enough of them have. Every rank calls this
        after each step.

        Raises UserError on all ranks where there is no time for three.
        """
        learner, seconds = self.learner, self.learner.run.training.seconds
        if seconds is None:
            return
        self.ends.append(broadcast_from_rank0(lambda: time.perf_counter() - self.started_at))
        steps = steps_in_time(seconds, self.first_step, self.ends)
        if steps is None:
            return
        learner.run = with_decided_steps(learner.run, steps)
        progress.set_steps(steps)
        progress.log(f"{len(self.ends)} steps took {self.ends[-1]:.1f} s: {steps} steps fit into {seconds:g} s")
        if learner.mesh.rank == 0:
            rewrite_run_file(learner.directory, with_decided_steps(read_run_directory(learner.directory)[0], steps))
