"""Training of a rank from a start to its end: resume, open the logs, train, and print the results."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator

from phalanx.data.packing import Batch
from phalanx.launch.process import LAUNCHER_PID_ENV
from phalanx.parallel.comm.device_memory import device_memory_bytes
from phalanx.runs.events import FINISHED, QUARANTINED, STARTED, append_event, mtime_or_none
from phalanx.runs.metrics import METRICS_FILE, MetricsRecord
from phalanx.runs.step_records import FORMAT, RunHeader, rank_record_file
from phalanx.train.callbacks.callback import build_callbacks
from phalanx.train.callbacks.standard import standard_callbacks
from phalanx.train.guards.collective_log import OrderGuard
from phalanx.train.guards.divergence import LossSpikeDetector
from phalanx.train.loggers import JsonLinesLogger, Logger, open_loggers
from phalanx.train.messages import end_message, start_message
from phalanx.train.profiling.clock_sync import measure_clock_offset
from phalanx.train.profiling.memory_report import write_comparison
from phalanx.train.profiling.step_profiler import StepProfiler, first_steady_step
from phalanx.train.progress import ProgressDisplay
from phalanx.train.sample import generate_sample
from phalanx.train.trainer import Trainer

FLUSH_SECONDS = 1.0
"""Maximum delay of rank records in their files: thousands of ranks may share a file system."""


def train_session(
    trainer: Trainer,
    resume: bool,
    spike_detector: LossSpikeDetector,
    *,
    measure: bool,
    window: range | None,
    order_guard: OrderGuard,
) -> None:
    """Train from the newest checkpoint or the beginning, with logs and events, and print the results.

    Args:
        trainer: The trainer.
        resume: Continue from the newest checkpoint.
        spike_detector: Detector of loss spikes.
        measure: Measure the memory and the traffic of one step.
        window: Steps to profile.
        order_guard: Guard of the order of collectives.
    """
    run = trainer.run
    directory = trainer.directory
    quiet = not trainer.is_main
    user_callbacks = build_callbacks(run.callbacks)
    resumed, damaged = trainer.resume() if resume else (0, {})
    config = run.model_dump(mode="json")
    alive_until = mtime_or_none(directory / METRICS_FILE)
    logs = [] if quiet else open_loggers(directory, trainer.step, run.metrics.wandb, name=run.name, config=config)
    rank_log = open_step_records(trainer) if run.metrics.per_rank_records else None
    steps_to_profile = profiled_steps(trainer, measure, window)
    if trainer.is_main:
        launcher = int(os.environ.get(LAUNCHER_PID_ENV, "0"))
        ranks = trainer.mesh.dims.world_size
        append_event(directory, STARTED, ranks=ranks, step=trainer.step, launcher=launcher, alive_until=alive_until)
    failed = True
    try:
        steps = run.training.steps if run.training.has_decided_steps else None
        with ProgressDisplay(trainer.step, steps, quiet) as progress:
            _report_damaged(trainer, damaged, progress)
            progress.log(start_message(trainer, resumed))
            if window is not None and not steps_to_profile:
                text = f"steps {window[0]} to {window[-1]} are already done or after the last step"
                progress.log(f"no step is profiled: {text}")
            step = order_guard.after_each(_profiled_step(trainer, steps_to_profile, progress))
            callbacks = standard_callbacks(trainer, logs, user_callbacks, spike_detector=spike_detector)
            evaluation = trainer.train(callbacks, progress, step, rank_log=rank_log)
            if steps_to_profile and trainer.step < steps_to_profile[0]:
                progress.log(f"no step was profiled: the last step was {trainer.step}")
        failed = False
        if trainer.is_main:
            append_event(directory, FINISHED, step=trainer.step)
    finally:
        for log in [*logs, *([rank_log] if rank_log else [])]:
            log.close(failed)
    text = generate_sample(trainer) if run.evaluation.prompt and trainer.is_complete else ""
    if trainer.is_main:
        print(end_message(trainer, evaluation, text))
        if measure:
            print(write_comparison(run.on_device(trainer.device.type), trainer.mesh.dims.world_size, directory))


def _report_damaged(trainer: Trainer, damaged: dict[str, str], progress: ProgressDisplay) -> None:
    """Print and record the checkpoints that were quarantined, with their problems."""
    for name, problem in damaged.items():
        progress.log(f"checkpoint {name} is damaged and was quarantined: {problem}")
        if trainer.is_main:
            append_event(trainer.directory, QUARANTINED, checkpoint=name, problem=problem)


def _profiled_step(
    trainer: Trainer, steps_to_profile: range, progress: ProgressDisplay
) -> Callable[[Iterator[Batch]], MetricsRecord]:
    """Return the trainer's step, with profiling in some steps."""
    if not steps_to_profile:
        return trainer.train_step
    profiler = StepProfiler(trainer, steps_to_profile)
    if profiler.metered_step is None:
        progress.log(f"memory is not measured: step {profiler.first_steady_step} is the first steady step")
    return profiler


def profiled_steps(trainer: Trainer, measure: bool, window: range | None) -> range:
    """Return the steps to profile.

    Args:
        trainer: The trainer, after it has resumed.
        measure: Without a window, profile one step.
        window: The steps to profile, of which the remaining ones are returned.
    """
    if window is None:
        first = trainer.step + first_steady_step(trainer.run)
        return range(first, first + measure)
    return range(max(window.start, trainer.step + 1), min(window.stop, trainer.run.training.steps + 1))


def open_step_records(trainer: Trainer) -> Logger:
    """Open this rank's step records, and write their header."""
    file = rank_record_file(trainer.directory, trainer.mesh.rank)
    offset = measure_clock_offset(trainer.device, trainer.run.training.collective_timeout_seconds)
    file.parent.mkdir(exist_ok=True)
    rank_log = JsonLinesLogger(file, trainer.step, FLUSH_SECONDS)
    opening: RunHeader = {
        "format": FORMAT,
        "rank": trainer.mesh.rank,
        "ranks": trainer.mesh.dims.world_size,
        "host": socket.gethostname(),
        "device": trainer.device.type,
        "step": trainer.step,
        "clock_offset_seconds": offset.seconds,
        "clock_error_seconds": offset.error_seconds,
        "memory_bytes": device_memory_bytes(trainer.device),
    }
    if trainer.device.type == "cpu":
        opening["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    rank_log.write(dict(opening))
    return rank_log
