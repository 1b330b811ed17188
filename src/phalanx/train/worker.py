"""Entry point of a rank: initialize the process group, train, roll back after a divergence, report a failure."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from phalanx.cost.exact.layout_checks import check_layout
from phalanx.launch.failures import as_user_error, write_failure
from phalanx.launch.process import (
    LAUNCHER_PID_ENV,
    env_rank,
    handling_signals,
    init_distributed,
    select_device,
    use_deterministic_kernels,
)
from phalanx.parallel.comm.objects import broadcast_from_rank0
from phalanx.runs.checkpoints import CHECKPOINTS_DIR, checkpoints, quarantine, step_name, step_of
from phalanx.runs.create import is_run_directory, read_run_directory
from phalanx.runs.errors import CallbackError, CollectiveOrderError, CorruptionError, DivergenceError
from phalanx.runs.hang_dumps import remove_dumps, remove_dumps_from_rank
from phalanx.runs.lock import SHUTDOWN_GRACE_SECONDS, acquire_run_lock
from phalanx.spec.errors import EXIT_INTERRUPTED, EXIT_STOPPED, UserError
from phalanx.spec.files.load import load_run, write_effective_layout
from phalanx.spec.layout import Layout
from phalanx.spec.run import RunSpec
from phalanx.train.checkpoint.checkpointer import latest_step, latest_valid_checkpoint
from phalanx.train.create_run import check_machine_memory, create_run
from phalanx.train.guards.collective_log import OrderGuard
from phalanx.train.guards.divergence import LossSpikeDetector, count_rollbacks, has_diverged_again, record_rollback
from phalanx.train.guards.oom_report import oom_report
from phalanx.train.guards.watchdog import Watchdog
from phalanx.train.profiling.memory_report import remove_measured
from phalanx.train.profiling.peak_flops import rank_peak_flops
from phalanx.train.session import train_session
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import open_training_data


@dataclass(frozen=True)
class ReducedRanks:
    """Fewer ranks than a run was configured for, and their layout."""

    layout: Layout
    ranks: int


@dataclass
class _RankContext:
    """State of this rank, used to write its failure record."""

    directory: Path
    trainer: Trainer | None = None
    signals: list[int] = field(default_factory=list)

    def on_signal(self, number: int) -> None:
        """Record a signal; from the first step on, all ranks agree on the step to stop after."""
        self.signals.append(number)
        if self.trainer is not None and self.trainer.is_main and len(self.signals) == 1:
            print("phalanx: stopping after this step, with a checkpoint", file=sys.stderr)
        if self.trainer is not None:
            self.trainer.stop_requested = True


def run_rank(
    source: Path,
    overrides: list[str],
    resume: bool,
    measure: bool = False,
    window: range | None = None,
    reduced: ReducedRanks | None = None,
    device: str | None = None,
    force: bool = False,
) -> int:
    """Train on this rank, and return the exit code.

    Args:
        source: A run directory, or a run file from which rank 0 creates one.
        overrides: Changes of a run file's fields.
        resume: Continue from the newest checkpoint.
        measure: Measure the memory and the traffic of one step.
        window: Steps to profile.
        reduced: Layout of fewer ranks than the run was configured for.
        device: Device type chosen by a launcher.
        force: Start even if a run file plans more memory than is available.
    """
    context = _RankContext(source)
    try:
        with handling_signals(context.on_signal):
            _run(
                context,
                overrides,
                resume,
                measure=measure,
                window=window,
                reduced=reduced,
                device_type=device,
                force=force,
            )
    except SystemExit as system_exit:  # rank 0 prints the reason
        return int(system_exit.code or 0)
    except BaseException as error:
        return _record_failure(context, error)
    trainer = context.trainer
    if trainer is not None and trainer.should_stop and not trainer.is_complete:
        is_interactive = (
            context.signals[:1] == [signal.SIGINT] and LAUNCHER_PID_ENV not in os.environ
        )  # a launcher prints this itself
        return EXIT_INTERRUPTED if is_interactive else EXIT_STOPPED
    return 0


def _run(
    context: _RankContext,
    overrides: list[str],
    resume: bool,
    measure: bool,
    window: range | None,
    reduced: ReducedRanks | None,
    device_type: str | None,
    force: bool,
) -> None:
    source = context.directory
    prepared = context.directory.is_dir()
    if prepared and overrides:
        raise UserError("--set", overrides, "has no effect on a run directory", fix="use the run file instead")
    run = read_run_directory(source)[0] if prepared else load_run(source, overrides)
    if prepared:
        remove_dumps(source, env_rank())
    if run.training.deterministic:
        use_deterministic_kernels()
    timeout_seconds = run.training.collective_timeout_seconds
    device = init_distributed(device_type or select_device(run), timeout_seconds, reduced.ranks if reduced else None)
    if not prepared:
        context.directory = _set_up_on_rank0(run, resume, force)
    directory = context.directory
    run, data = read_run_directory(directory)
    is_rank0 = not dist.is_initialized() or dist.get_rank() == 0
    # A rank of a previous start that lost the others exits only after the timeout of its collective.
    lock_timeout = timeout_seconds if LAUNCHER_PID_ENV in os.environ else SHUTDOWN_GRACE_SECONDS
    launcher = int(os.environ.get(LAUNCHER_PID_ENV, os.getpid()))
    lock = acquire_run_lock(directory, lock_timeout + SHUTDOWN_GRACE_SECONDS, launcher) if is_rank0 else None
    if reduced is not None:
        run = run.model_copy(update={"layout": reduced.layout})
        check_layout(run, reduced.ranks)
    if is_rank0:
        write_effective_layout(directory, reduced.layout if reduced else None)
        remove_dumps_from_rank(directory, dist.get_world_size() if dist.is_initialized() else 1)
    fresh = not checkpoints(directory / CHECKPOINTS_DIR)
    if measure or window:
        remove_measured(directory)  # from an earlier start, perhaps with other ranks
    corpus = open_training_data(run, data, fresh)
    peak_flops = rank_peak_flops(run, device)
    with Watchdog(directory, timeout_seconds) as watchdog, OrderGuard(directory) as order_guard:

        def make_trainer() -> Trainer:
            current_run = run if context.trainer is None else context.trainer.run  # its number of steps may be decided
            watchdog.trainer = context.trainer = Trainer(
                current_run, corpus, directory, device=device, peak_flops=peak_flops
            )
            context.trainer.stop_requested = bool(context.signals)  # signals that arrived before there was a trainer
            return context.trainer

        train = partial(train_session, measure=measure, window=window, order_guard=order_guard)
        _train_with_rollbacks(make_trainer, run, directory, train=train, resume=resume or prepared)
    if lock is not None:
        lock.close()


def _train_with_rollbacks(
    make_trainer: Callable[[], Trainer],
    run: RunSpec,
    directory: Path,
    train: Callable[[Trainer, bool, LossSpikeDetector], None],
    resume: bool,
) -> None:
    """Train, and roll back after a divergence, up to the maximum number of rollbacks of the run."""
    allowed = run.recovery.max_rollbacks
    spike_detector = LossSpikeDetector(run.recovery.loss_spike_ratio)
    rollbacks_left = allowed and allowed - broadcast_from_rank0(partial(count_rollbacks, directory))
    while True:
        trainer = make_trainer()
        try:
            return train(trainer, resume, spike_detector if rollbacks_left > 0 else LossSpikeDetector(None))
        except DivergenceError as error:
            if rollbacks_left < 1 or isinstance(error, CorruptionError | CollectiveOrderError):
                raise
            rollbacks_left, resume = rollbacks_left - 1, True
            _roll_back(trainer, error)


def _record_failure(context: _RankContext, error: BaseException) -> int:
    """Write a failure record for the launcher, or print the error without one; return the exit code."""
    trainer, error = context.trainer, as_user_error(error, context.directory)
    rank, step = (trainer.mesh.rank, trainer.step) if trainer else (env_rank(), 0)
    if is_run_directory(context.directory):
        memory = oom_report(error, trainer)
        final = isinstance(error, DivergenceError | CallbackError)
        write_failure(context.directory, rank, step, error=error, memory=memory, final=final)
    if LAUNCHER_PID_ENV not in os.environ:
        is_user_error = isinstance(error, UserError | DivergenceError)
        print(f"phalanx: rank {rank} failed after step {step}: {error}", file=sys.stderr)
        if not is_user_error:
            traceback.print_exc()
    return 2 if isinstance(error, UserError) else 1


def _roll_back(trainer: Trainer, error: DivergenceError) -> None:
    """Choose the checkpoint for a rollback, and record the rollback.

    It is the newest checkpoint, or the previous one if the newest has led to divergence twice. Raises `error` without a
    previous one."""
    directory = trainer.directory
    checkpoint_directory = trainer.checkpointer.directory
    newest = latest_step(checkpoint_directory)
    before_step = newest if broadcast_from_rank0(partial(has_diverged_again, directory, newest)) else None
    checkpoint, _ = latest_valid_checkpoint(checkpoint_directory, before_step)
    if before_step is not None and checkpoint is None:
        raise error
    to_step = step_of(checkpoint) if checkpoint else 0
    if trainer.is_main:
        if before_step is not None:
            quarantine(checkpoint_directory, [step_name(before_step)], checkpoint)
        record_rollback(directory, trainer.step, to_step, reason=str(error))
        skipped_text = f"skipping the text of steps {to_step + 1} to {trainer.step}"
        print(f"phalanx: {error}\n  rolling back to step {to_step}; {skipped_text}", file=sys.stderr)
    if dist.is_initialized():
        dist.barrier()


def _set_up_on_rank0(run: RunSpec, resume: bool, force: bool) -> Path:
    """Create the run on rank 0 under torchrun, while the other ranks wait."""
    if not dist.is_initialized():
        return _create_run(run, 1, resume, force=force)
    # Through the store, not a collective: tokenizing may take longer than the timeout of collectives.
    store = dist.distributed_c10d._get_default_store()
    key = "phalanx/run directory"
    if dist.get_rank() == 0:
        try:
            directory = _create_run(run, dist.get_world_size(), resume, force=force)
        except BaseException:
            store.set(key, "")
            raise
        store.set(key, str(directory))
        return directory
    store.wait([key], timedelta(days=1))
    path = store.get(key).decode()
    if not path:
        raise SystemExit(2)
    return Path(path)


def _create_run(run: RunSpec, world_size: int, resume: bool, force: bool) -> Path:
    if not force:
        check_machine_memory(run, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return create_run(run, world_size, resume)
