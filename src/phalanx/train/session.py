"""Training of a rank from a start to its end: resume, open the logs, train, and print the results."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator

from phalanx.data.packing import Batch
from phalanx.launch.process import LAUNCHER_PID_ENV
from phalanx.runs.events import FINISHED, QUARANTINED, STARTED, append_event, changed_settings, mtime_or_none
from phalanx.runs.metrics import METRICS_FILE
from phalanx.spec.log import RESULT
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.train.callbacks.callback import build_callbacks
from phalanx.train.callbacks.gradient_noise import GradientNoise
from phalanx.train.callbacks.standard import build_record_writers, standard_callbacks
from phalanx.train.guards.collective_log import OrderGuard
from phalanx.train.guards.divergence import LossSpikeDetector
from phalanx.train.messages import end_message, start_message
from phalanx.train.profiling.memory_report import write_comparison
from phalanx.train.profiling.step_profiler import StepProfiler, first_steady_step
from phalanx.train.progress import ProgressDisplay
from phalanx.train.rank_options import RankOptions
from phalanx.train.sample import generate_sample
from phalanx.train.step_metrics import ReadRecord
from phalanx.train.trainer import Trainer

logger = logging.getLogger(__name__)


def train_session(
    trainer: Trainer, options: RankOptions, spike_detector: LossSpikeDetector, order_guard: OrderGuard
) -> None:
    """Train from the newest checkpoint or the beginning, with logs and events, and print the results."""
    window = options.window
    writers = build_record_writers(trainer.run)
    callbacks = standard_callbacks(trainer, writers, build_callbacks(trainer.run.callbacks), spike_detector)
    resumed, damaged = trainer.resume() if options.resume else (0, {})
    steps_to_profile = profiled_steps(trainer, options.measure, window)
    if trainer.is_main:
        append_event(
            trainer.directory,
            STARTED,
            ranks=trainer.mesh.dims.world_size,
            step=trainer.step,
            launcher=int(os.environ.get(LAUNCHER_PID_ENV, "0")),
            alive_until=mtime_or_none(trainer.directory / METRICS_FILE),
            **changed_settings(trainer.directory, trainer.run.settings),
        )
    planned = trainer.run.training
    steps = planned.steps if planned.has_decided_steps else None
    with ProgressDisplay(trainer.step, steps, quiet=not trainer.is_main) as progress:
        for name, problem in damaged.items():
            if trainer.is_main:
                logger.warning("checkpoint %s is damaged and was quarantined: %s", name, problem)
                append_event(trainer.directory, QUARANTINED, checkpoint=name, problem=problem)
        progress.log(start_message(trainer, resumed))
        step: Callable[[Iterator[Batch]], ReadRecord] = trainer.launch_step
        if steps_to_profile:
            step = profiler = StepProfiler(trainer, steps_to_profile)
            if profiler.metered_step is None:
                progress.log(f"memory is not measured: step {profiler.first_steady_step} is the first steady step")
        elif window is not None:
            text = f"steps {window[0]} to {window[-1]} are already done or after the last step"
            progress.log(f"no step is profiled: {text}")
        if isinstance(noise := callbacks.get("gradient noise"), GradientNoise):
            step = noise.around(trainer, step)
        evaluation = trainer.train(callbacks, progress, order_guard.after_each(step))
        if steps_to_profile and trainer.step < steps_to_profile[0]:
            progress.log(f"no step was profiled: the last step was {trainer.step}")

    # The number of steps may have been decided during the run.
    run = trainer.run
    if trainer.is_main:
        ended_early = trainer.finish_reason is not None and run.training.steps < planned.steps
        append_event(
            trainer.directory, FINISHED, step=trainer.step, **({"reason": trainer.finish_reason} if ended_early else {})
        )
    sample = generate_sample(trainer) if run.evaluation.prompt and trainer.is_complete else ""
    if trainer.is_main:
        result_logger = logging.getLogger(RESULT)
        result_logger.info("%s", end_message(trainer, evaluation, sample))
        if options.measure:
            measured = ResolvedRun(run.on_device(trainer.device.type), trainer.mesh.dims.world_size)
            result_logger.info("%s", write_comparison(measured, trainer.directory))


def profiled_steps(trainer: Trainer, measure: bool, window: range | None) -> range:
    """Return the remaining steps to profile, after the trainer has resumed.

    They are those of the window, or without one the first steady step if `measure` is set."""
    if window is None:
        first = trainer.step + first_steady_step(trainer.run)
        return range(first, first + measure)
    return range(max(window.start, trainer.step + 1), min(window.stop, trainer.run.training.steps + 1))
