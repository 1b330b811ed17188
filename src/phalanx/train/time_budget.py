"""`training.seconds`: the number of steps in a time budget, decided after measuring the first steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from phalanx.parallel.comm.objects import broadcast_object
from phalanx.runs.metrics import MetricsRecord
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import plural
from phalanx.spec.phases import with_fixed_starts
from phalanx.spec.run import RunSpec
from phalanx.train.callbacks.callback import Callback

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer

DECISION_STEPS = 10
DECISION_SHARE = 0.05
"""Minimum number of measured steps, and minimum share of the time budget that they take."""
LATEST_DECISION_SHARE = 0.2
"""The share of the time after which fewer steps are enough."""
WARM_UP_STEPS = 2
"""First steps, which may be slower than later ones."""
MIN_STEPS = 3


def steps_in_time(seconds: float, first_step: int, step_seconds: Sequence[float]) -> int | None:
    """Return the number of steps of a run of `seconds`; None before enough steps are measured.

    `step_seconds` are the durations of the steps after the first `first_step`. Later steps are assumed to take the
    median of these, without the first two. Raises UserError if the time is too short for three steps."""
    measured_steps = len(step_seconds)
    elapsed = sum(step_seconds)
    if elapsed > seconds and first_step + measured_steps <= MIN_STEPS:
        problem = f"is too short for {MIN_STEPS} steps: the first {plural(measured_steps, 'step')} took {elapsed:.2g} s"
        enough_seconds = math.ceil((MIN_STEPS + 1) * elapsed / measured_steps)
        fix = f"use at least {enough_seconds} with --resume, or set training.steps instead"
        raise UserError("training.seconds", seconds, problem, fix)
    is_measured = measured_steps >= DECISION_STEPS and elapsed >= DECISION_SHARE * seconds
    if not is_measured and (measured_steps <= WARM_UP_STEPS or elapsed < LATEST_DECISION_SHARE * seconds):
        return None
    return first_step + measured_steps + math.floor(max(0.0, seconds - elapsed) / median(step_seconds[WARM_UP_STEPS:]))


def with_decided_steps(run: RunSpec, steps: int) -> RunSpec:
    """Return the run with this number of steps; it warms up for at most half of them.

    Phases start at the same steps as before."""
    warmup_steps = min(run.optimizer.warmup_steps, steps // 2)
    training = run.training.replace(steps=steps, seconds=None, epochs=None)
    optimizer = run.optimizer.replace(warmup_steps=warmup_steps)
    phase = with_fixed_starts(run, steps) if run.phase else []
    return run.replace(training=training, optimizer=optimizer, phase=phase)


class TimeBudget(Callback):
    """The time budget of a run with `training.seconds`; no effect on other runs."""

    def __init__(self) -> None:
        self.first_step = 0
        self.step_seconds: list[float] = []
        """Duration of each step on rank 0."""

    def is_due(self, trainer: Trainer) -> bool:
        """Return whether the number of steps is still to be decided, which the next step depends on."""
        return not trainer.run.training.has_decided_steps

    def on_train_start(self, trainer: Trainer) -> None:
        """Start to measure."""
        self.first_step = trainer.step

    def on_step_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Record the duration of a step, and decide the number of steps when enough are measured.

        Raises UserError on all ranks if the time is too short for three steps."""
        seconds = trainer.run.training.seconds
        assert seconds is not None
        self.step_seconds.append(broadcast_object(record["step_seconds"], src=0))
        steps = steps_in_time(seconds, self.first_step, self.step_seconds)
        if steps is None:
            return
        trainer.set_last_step(steps)
        measured = f"{plural(len(self.step_seconds), 'step')} took {sum(self.step_seconds):.1f} s"
        trainer.progress.log(f"{measured}: {steps} steps fit into {seconds:g} s")
