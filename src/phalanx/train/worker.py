"""Entry point of a rank: initialize the process group, train, roll back after a divergence, report a failure."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.cost.exact.layout_checks import check_layout
from phalanx.debug.oom import format_oom_report
from phalanx.launch.failures import as_user_error, write_failure
from phalanx.launch.process import (
    LAUNCHER_PID_ENV,
    check_fp8_capability,
    env_rank,
    handling_signals,
    init_distributed,
    select_device,
    use_deterministic_kernels,
)
from phalanx.parallel.comm.objects import broadcast_from_rank0, rank_and_world_size
from phalanx.runs.checkpoints import CHECKPOINTS_DIR, checkpoints, quarantine, step_name, step_of
from phalanx.runs.create import is_run_directory, read_run_directory, write_run_directory
from phalanx.runs.errors import CallbackError, CollectiveOrderError, CorruptionError, DivergenceError
from phalanx.runs.hang_dumps import remove_dumps, remove_dumps_from_rank
from phalanx.runs.lock import SHUTDOWN_GRACE_SECONDS, acquire_run_lock
from phalanx.spec.errors import EXIT_INTERRUPTED, EXIT_STOPPED, UserError
from phalanx.spec.files.load import load_run, require_run_file, write_effective_layout
from phalanx.spec.run import RunSpec
from phalanx.train.checkpoint.checkpointer import latest_step, latest_valid_checkpoint
from phalanx.train.create_run import check_and_prepare, check_machine_memory, decide_choices, decide_recomputation
from phalanx.train.guards.collective_log import OrderGuard
from phalanx.train.guards.divergence import LossSpikeDetector, count_rollbacks, has_diverged_again, record_rollback
from phalanx.train.guards.memory_snapshot import record_allocations, snapshot_entry
from phalanx.train.guards.oom_report import oom_report
from phalanx.train.guards.watchdog import Watchdog
from phalanx.train.profiling.memory_report import remove_measured
from phalanx.train.profiling.peak_flops import rank_peak_flops
from phalanx.train.rank_options import RankOptions
from phalanx.train.session import train_session
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import TrainingData, open_training_data


def run_rank(source: Path, options: RankOptions) -> int:
    """Train on this rank, and return the exit code.

    `source` is a run directory, or a run file from which rank 0 creates one."""
    session = RankSession(source, options)
    try:
        with handling_signals(session.on_signal):
            session.train()
    except SystemExit as system_exit:  # rank 0 prints the reason
        return int(system_exit.code or 0)
    except BaseException as error:
        return _record_failure(session, error)
    return session.exit_code


class RankSession:
    """A rank from its start to its end: join the other ranks, open the run, train."""

    def __init__(self, source: Path, options: RankOptions) -> None:
        """Start with a run directory, or with a run file from which rank 0 creates one."""
        self.options = options
        self.is_prepared = source.is_dir()
        self.directory = source
        self.trainer: Trainer | None = None
        self.signals: list[int] = []
        self.records_allocations = False
        """True if PyTorch keeps the history of allocations on this rank's GPU."""

    def on_signal(self, number: int) -> None:
        """Record a signal; from the first step on, all ranks agree on the step to stop after."""
        self.signals.append(number)
        if self.trainer is not None and self.trainer.is_main and len(self.signals) == 1:
            print("phalanx: stopping after the running step, with a checkpoint", file=sys.stderr)
        if self.trainer is not None:
            self.trainer.stop_requested = True

    @property
    def exit_code(self) -> int:
        """Exit code of a rank that did not fail."""
        trainer = self.trainer
        if trainer is None or not trainer.should_stop or trainer.is_complete:
            return 0
        # A launcher prints and returns its own code.
        is_interactive = self.signals[:1] == [signal.SIGINT] and LAUNCHER_PID_ENV not in os.environ
        return EXIT_INTERRUPTED if is_interactive else EXIT_STOPPED

    def train(self) -> None:
        """Join the other ranks, open the run, and train."""
        options = self.options
        reduced = options.reduced
        # Load the run before the ranks meet.
        if not self.is_prepared:
            require_run_file(self.directory)
            run = load_run(self.directory, list(options.overrides), trust=options.trust or None)
        elif options.overrides:
            problem = "has no effect on a run directory"
            raise UserError("--set", list(options.overrides), problem, "use the run file instead")
        else:
            remove_dumps(self.directory, env_rank())
            run = read_run_directory(self.directory, options.trust)[0]

        # Initialize the process group and the device.
        if run.training.deterministic:
            use_deterministic_kernels()
        device_type = options.device or select_device(run)
        timeout_seconds = run.training.collective_timeout_seconds
        device = init_distributed(device_type, timeout_seconds, reduced.ranks if reduced else None)
        if run.metrics.allocation_history and device.type == "cuda":
            record_allocations()
            self.records_allocations = True

        # Create or open the run directory. The components of a run file were permitted when it was loaded.
        if not self.is_prepared:
            self.directory = _set_up_on_rank0(run, options.resume, options.force)
        run, data = read_run_directory(self.directory, options.trust or not self.is_prepared)
        rank, world_size = rank_and_world_size()
        lock = None
        if rank == 0:
            launcher = os.environ.get(LAUNCHER_PID_ENV)
            # A rank of a previous start that lost the others exits only after the timeout of its collective.
            grace_seconds = run.training.collective_timeout_seconds if launcher else SHUTDOWN_GRACE_SECONDS
            lock_seconds = grace_seconds + SHUTDOWN_GRACE_SECONDS
            lock = acquire_run_lock(self.directory, lock_seconds, int(launcher or os.getpid()))
        if reduced is not None:
            run = run.replace(layout=reduced.layout)
            check_layout(run, reduced.ranks)
        if rank == 0:
            write_effective_layout(self.directory, reduced.layout if reduced else None)
            # An earlier start perhaps had more ranks.
            remove_dumps_from_rank(self.directory, world_size)
        if options.measure or options.window:
            remove_measured(self.directory)

        fresh = not checkpoints(self.directory / CHECKPOINTS_DIR)
        self._train_with_rollbacks(run, open_training_data(run, data, fresh), device)
        if lock is not None:
            lock.close()

    def _train_with_rollbacks(self, run: RunSpec, corpus: TrainingData, device: torch.device) -> None:
        """Train, and roll back after a divergence, up to the maximum number of rollbacks of the run."""
        options = self.options
        if self.is_prepared:
            options = replace(options, resume=True)
        spike_detector = LossSpikeDetector(run.recovery.loss_spike_ratio)
        allowed = run.recovery.max_rollbacks
        rollbacks_left = allowed and allowed - broadcast_from_rank0(partial(count_rollbacks, self.directory))
        peak_flops = rank_peak_flops(run, device)
        timeout_seconds = run.training.collective_timeout_seconds
        with Watchdog(self.directory, timeout_seconds) as watchdog, OrderGuard(self.directory) as order_guard:
            while True:
                trainer = Trainer(run, corpus, self.directory, device, peak_flops)
                watchdog.trainer = self.trainer = trainer
                # Signals may have arrived before there was a trainer.
                trainer.stop_requested = bool(self.signals)
                detector = spike_detector if rollbacks_left > 0 else LossSpikeDetector(None)
                try:
                    return train_session(trainer, options, detector, order_guard)
                except DivergenceError as error:
                    if rollbacks_left < 1 or isinstance(error, CorruptionError | CollectiveOrderError):
                        raise
                    rollbacks_left -= 1
                    options = replace(options, resume=True)
                    _roll_back(trainer, error)
                    # The number of steps may have been decided during the run.
                    run = trainer.run
                    # Free this trainer before the next one allocates memory.
                    del trainer
                    watchdog.trainer = self.trainer = None


def _record_failure(session: RankSession, error: BaseException) -> int:
    """Write a failure record for the launcher, or print the error without one; return the exit code."""
    trainer = session.trainer
    error = as_user_error(error, session.directory)
    rank, step = (trainer.mesh.rank, trainer.step) if trainer else (env_rank(), 0)
    memory = oom_report(error, trainer)
    if is_run_directory(session.directory):
        on_gpu = session.records_allocations or (trainer is not None and trainer.device.type == "cuda")
        if memory and on_gpu:
            memory |= snapshot_entry(session.directory, rank, is_recorded=session.records_allocations)
        final = isinstance(error, DivergenceError | CallbackError)
        write_failure(session.directory, rank, step, error=error, memory=memory, final=final)
    if LAUNCHER_PID_ENV not in os.environ:
        is_user_error = isinstance(error, UserError | DivergenceError)
        print(f"phalanx: rank {rank} failed after step {step}: {format_oom_report(memory) or error}", file=sys.stderr)
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
        return _create_run(run, 1, resume, force)
    # Through the store, not a collective: tokenizing may take longer than the timeout of collectives.
    store = dist.distributed_c10d._get_default_store()
    key = "phalanx/run directory"
    if dist.get_rank() == 0:
        try:
            directory = _create_run(run, dist.get_world_size(), resume, force)
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
    check_fp8_capability(run)
    nproc = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    run = decide_recomputation(decide_choices(run, resume), world_size, nproc)
    if not force:
        check_machine_memory(run, nproc)
    return write_run_directory(run, check_and_prepare(run, world_size, resume))
