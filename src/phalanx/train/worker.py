"""Entry point of a rank: initialize the process group, train, roll back after a divergence, report a failure."""

from __future__ import annotations

import json
import logging
import os
import signal
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from phalanx.cost.exact.layout_checks import check_layout
from phalanx.debug.collective_log import is_peer_loss
from phalanx.debug.oom import format_oom_report
from phalanx.launch.failures import as_user_error, write_failure
from phalanx.launch.process import (
    LAUNCHER_PID_ENV,
    check_fp8_capability,
    env_rank,
    env_world_size,
    handling_signals,
    init_distributed,
    open_store,
    select_device,
    use_deterministic_kernels,
)
from phalanx.launch.starters import is_restart
from phalanx.parallel.comm.objects import broadcast_from_rank0, rank_and_world_size
from phalanx.runs.checkpoint_store import list_in_run_directory
from phalanx.runs.checkpoints import (
    CHECKPOINTS_DIR,
    abandon_newer,
    checkpoints,
    quarantine,
    require_valid_checkpoint,
    split_checkpoint_path,
    step_name,
    step_of,
)
from phalanx.runs.create import (
    completed_steps,
    is_run_directory,
    read_run_directory,
    run_directory,
    write_run_directory,
)
from phalanx.runs.errors import CallbackError, CollectiveOrderError, CorruptionError, DivergenceError
from phalanx.runs.hang_dumps import remove_dumps, remove_dumps_from_rank
from phalanx.runs.lock import SHUTDOWN_GRACE_SECONDS, acquire_run_lock, check_not_running
from phalanx.spec.base import require
from phalanx.spec.components import named_components, require_trusted
from phalanx.spec.errors import EXIT_INTERRUPTED, EXIT_STOPPED, UserError, error_from_record
from phalanx.spec.files.load import load_run, require_run_file, write_effective_layout
from phalanx.spec.recovery import RecoverySpec
from phalanx.spec.resolved_run import ResolvedRun
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

logger = logging.getLogger(__name__)
PREPARED_KEY = "prepared"
"""Store key of the run directory, or of the error of rank 0."""
READ_KEY = "read/"
"""Prefix of the store keys of the ranks that have read what rank 0 has prepared."""
REPORTED_KEY = "reported/"
"""Prefix of the store keys of the errors that a rank has printed."""
USER_ERROR_KEY = "user error"
"""Store key that is set after any UserError."""
FAILED_KEY = "failed/"
"""Prefix of the store keys of the ranks that have failed."""
REPORT_TIMEOUT = timedelta(seconds=15)
"""Time for other ranks to report the error that rank 0 has, and to exit with their own codes."""


def run_rank(source: Path, options: RankOptions) -> int:
    """Train on this rank, and return the exit code.

    `source` is a run directory, or a run file from which rank 0 creates one."""
    session = RankSession(source, options)
    try:
        session.run()
        code = session.exit_code
    except BaseException as error:
        code = 2 if isinstance(error, UserError) else 1
    # A launcher decides by our own codes.
    return code if session.recovery is None or LAUNCHER_PID_ENV in os.environ else session.recovery.exit_code(code)


class RankSession:
    """A rank from its start to its end: join the other ranks, open the run, train."""

    def __init__(self, source: RunSpec | Path, options: RankOptions) -> None:
        """Start with a run directory, or with a run or its file, from which rank 0 creates one."""
        self.source = source
        self.options = options
        self.is_prepared = False
        """True if the source is a run directory."""
        self.is_restarted = is_restart(os.environ)
        self.directory = source if isinstance(source, Path) else Path(source.output_dir)
        self.store: Store | None = None
        """Store of the ranks that another program than our launcher started."""
        self.is_complete = False
        """True if the run was complete before this start."""
        self.reported_by_rank_0 = False
        """True if rank 0 reports the error of this rank."""
        self.recovery: RecoverySpec | None = None
        self.trainer: Trainer | None = None
        self.signals: list[int] = []
        self.records_allocations = False
        """True if PyTorch keeps the history of allocations on this rank's GPU."""

    def on_signal(self, number: int) -> None:
        """Record a signal; from the first step on, all ranks agree on the step to stop after."""
        self.signals.append(number)
        if self.trainer is not None and self.trainer.is_main and len(self.signals) == 1:
            logger.info("stopping after the running step, with a checkpoint")
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

    def run(self) -> None:
        """Train, and report an error before it is raised."""
        try:
            self._resolve_source()
            # Rank 0 alone reads the run file and creates the run directory, so that an error in them is reported once.
            # (A launcher has done so before it started the ranks, some of which may stand by.) A signal ends the wait.
            if LAUNCHER_PID_ENV not in os.environ and self.options.reduced is None:
                self.store = open_store()
            with handling_signals(self.on_signal):
                self.train()
        except BaseException as error:
            translated = as_user_error(error, self.directory)
            _report_failure(self, translated)
            if translated is error:
                raise
            raise translated from error

    def _resolve_source(self) -> None:
        """Find the run directory and the step of a checkpoint's path."""
        step = self.options.step
        if isinstance(self.source, Path):
            self.source, step = split_checkpoint_path(self.source, step)
            self.directory = self.source
            self.is_prepared = self.source.is_dir()
        # Ranks that are started again go on, and do not go back again.
        resume = self.options.resume or self.is_restarted
        self.options = replace(self.options, resume=resume, step=None if self.is_restarted else step)

    def train(self) -> None:
        """Open the run, make the process group, and train."""
        options = self.options
        reduced = options.reduced
        self.directory = self._prepare_on_rank_0()
        if self.is_complete:
            return
        if self.is_prepared:
            remove_dumps(self.directory, env_rank())
        # The components of a run file were permitted when it was loaded.
        run, data = read_run_directory(self.directory, options.trust or not self.is_prepared)
        self.recovery = run.recovery

        # Initialize the process group and the device.
        if run.training.deterministic:
            use_deterministic_kernels()
        device_type = options.device or select_device(run)
        timeout_seconds = run.training.collective_timeout_seconds
        device = init_distributed(device_type, timeout_seconds, reduced.ranks if reduced else None, self.store)
        if run.metrics.allocation_history and device.type == "cuda":
            record_allocations()
            self.records_allocations = True

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
            check_layout(ResolvedRun(run, reduced.ranks))
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

    def _prepare_on_rank_0(self) -> Path:
        """Check the run on rank 0 while the other ranks wait, and return its directory on all of them.

        Raises the UserError of rank 0 on all ranks."""
        if self.store is None:
            return self._prepare()
        # Through the store, not a collective: tokenizing may take longer than the timeout of collectives.
        if env_rank() == 0:
            try:
                directory = self._prepare()
            except BaseException as error:
                record = error.to_record() if isinstance(error, UserError) else None
                self.store.set(PREPARED_KEY, json.dumps({"error": record}))
                raise
            prepared = {"directory": str(directory.absolute()), "is_complete": self.is_complete}
            self.store.set(PREPARED_KEY, json.dumps(prepared))
            if self.is_complete:
                _wait_for_readers(self.store)
            return directory
        self.store.wait([PREPARED_KEY], timedelta(days=1))
        message = json.loads(self.store.get(PREPARED_KEY))
        self.store.set(f"{READ_KEY}{env_rank()}", "")
        if "directory" in message:
            self.is_complete = message["is_complete"]
            return Path(message["directory"])
        self.reported_by_rank_0 = True
        if message["error"] is None:
            raise RuntimeError("rank 0 failed before training")
        raise error_from_record(message["error"])

    def _prepare(self) -> Path:
        """Create the run directory, or check the existing one, and return it."""
        options = self.options
        # A launcher has checked the run, and its ranks read the directory next.
        if LAUNCHER_PID_ENV in os.environ:
            return self.directory
        run = self._load_run()
        for field, component in named_components(run):
            require_trusted(field, component)
        directory = self.directory if self.is_prepared else run_directory(run)
        continues = options.resume or self.is_prepared
        step = None
        if options.step is not None:
            require(continues, "--step", options.step, "has no effect without --resume", fix="add --resume")
            list_in_run_directory(run, directory)
            step = step_of(require_valid_checkpoint(directory, options.step))
        # Ranks that are started again may have failed after the last step, in the evaluation.
        if continues and not self.is_restarted and (steps := completed_steps(run, step)):
            longer = "to train longer, start with its run file, --resume and --set training.steps=N"
            logger.info("the run is complete: step %s is its last; %s", f"{steps:,}", longer)
            self.is_complete = True
            return directory
        if not self.is_prepared:
            _create_run(run, options.resume, options.force, step)
        if step is not None:
            check_not_running(directory)
            abandon_newer(directory, step)
        return directory

    def _load_run(self) -> RunSpec:
        options = self.options
        source = self.source
        if self.is_prepared:
            if options.overrides:
                problem = "has no effect on a run directory"
                raise UserError("--set", list(options.overrides), problem, "use the run file instead")
            # The directory may have been moved or copied since its creation.
            directory = self.directory.absolute()
            run, _ = read_run_directory(directory, options.trust)
            return run.replace(output_dir=str(directory.parent), name=directory.name)
        if isinstance(source, RunSpec):
            return source
        require_run_file(source)
        return load_run(source, options.overrides, machine=options.machine, trust=options.trust or None)

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


def _wait_for_readers(store: Store) -> None:
    """Wait until the other ranks have read what rank 0 has prepared, because the store may be in its process."""
    with suppress(RuntimeError):
        store.wait([f"{READ_KEY}{rank}" for rank in range(1, env_world_size())], REPORT_TIMEOUT)


def _report_failure(session: RankSession, error: BaseException) -> None:
    """Write a failure record for the launcher; without one, print the error, once if all ranks have the same."""
    trainer = session.trainer
    rank, step = (trainer.mesh.rank, trainer.step) if trainer else (env_rank(), 0)
    memory = oom_report(error, trainer)
    if is_run_directory(session.directory):
        on_gpu = session.records_allocations or (trainer is not None and trainer.device.type == "cuda")
        if memory and on_gpu:
            memory |= snapshot_entry(session.directory, rank, is_recorded=session.records_allocations)
        final = isinstance(error, DivergenceError | CallbackError)
        write_failure(session.directory, rank, step, error=error, memory=memory, final=final)
    if LAUNCHER_PID_ENV in os.environ:
        return
    is_user_error = isinstance(error, UserError | DivergenceError)
    message = format_oom_report(memory) or str(error)
    if not session.reported_by_rank_0 and _is_first_report(session.store, message, is_user_error):
        # An error before training is that of all ranks, so it names no rank or step.
        origin = "" if is_user_error and trainer is None and rank == 0 else f"failed after step {step}: "
        logger.error("%s%s", origin, message, exc_info=not is_user_error)
    if session.store is not None:
        # The store may be in the process of rank 0.
        with suppress(RuntimeError):
            session.store.set(f"{FAILED_KEY}{rank}", "")
            if rank == 0:
                others = [f"{FAILED_KEY}{other}" for other in range(1, env_world_size())]
                session.store.wait(others, REPORT_TIMEOUT)


def _is_first_report(store: Store | None, message: str, is_user_error: bool) -> bool:
    """Return whether no other rank has reported this error, or one that made this rank lose its peers."""
    # If the store is gone, report too much rather than nothing.
    with suppress(RuntimeError):
        if store is None and is_user_error:
            return env_rank() == 0
        if store is not None and is_user_error:
            store.set(USER_ERROR_KEY, "")
            return store.add(f"{REPORTED_KEY}{message}", 1) == 1
        if store is not None and is_peer_loss(message):
            return not store.check([USER_ERROR_KEY])
    return True


def _roll_back(trainer: Trainer, error: DivergenceError) -> None:
    """Choose the checkpoint for a rollback, and record the rollback.

    It is the newest checkpoint, or the previous one if the newest has led to divergence twice. Raises `error` without a
    previous one."""
    directory = trainer.directory
    # Its thread would compete with that of the next trainer.
    trainer.finish_uploads()
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
        logger.warning("%s\n  rolling back to step %d; %s", error, to_step, skipped_text)
    if dist.is_initialized():
        dist.barrier()


def _create_run(run: RunSpec, resume: bool, force: bool, step: int | None) -> None:
    check_fp8_capability(run)
    world_size = env_world_size()
    nproc = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    run = decide_recomputation(decide_choices(run, resume), world_size, nproc)
    if not force:
        check_machine_memory(run, nproc)
    write_run_directory(*check_and_prepare(run, world_size, resume, step=step))
