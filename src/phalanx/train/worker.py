"""One rank's life: join the others, train, say how it went."""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event, Thread

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from phalanx.cost.stages import check_layout
from phalanx.measure.events import BEGAN, ENDED, SET_ASIDE, last_written, note
from phalanx.measure.incident import forget, forget_from
from phalanx.measure.lock import ENDS_WITHIN_SECONDS, hold
from phalanx.measure.matmul import peak_flops
from phalanx.measure.memory import device_memory_bytes
from phalanx.measure.products import COMPUTE
from phalanx.measure.record import FORMAT, Opening, record_file
from phalanx.spec.errors import UserError
from phalanx.spec.layout import Layout
from phalanx.spec.load import keep_layout, load_machine, load_run, preset_names
from phalanx.spec.run import RunSpec
from phalanx.train.checkpoint import newest_checkpoint, newest_step, told_by_first
from phalanx.train.clocks import clock_offset
from phalanx.train.closely import Closely, measured_number
from phalanx.train.corpus import open_corpus
from phalanx.train.divergence import CorruptionError, DivergenceError, Losses, led_astray, roll_back, rollbacks
from phalanx.train.held import account
from phalanx.train.launch import (
    LAUNCHER,
    choose_device,
    end_with_launcher,
    join_ranks,
    on_signal,
    own_rank,
    write_failure,
)
from phalanx.train.manifest import checkpoints, reached, set_aside, step_name, step_of
from phalanx.train.measured import compare, forget_measured
from phalanx.train.metrics import METRICS_FILE, JsonLines, Log, open_logs
from phalanx.train.progress import Progress
from phalanx.train.setup import INTERRUPTED, STOPPED, read_directory, set_up
from phalanx.train.trainer import Trainer
from phalanx.train.watchdog import Watchdog
from phalanx.train.words import closing, opening, sample

FLUSH_SECONDS = 1.0
"""What ranks note may be so late in their files: thousands of them may share a file system."""


@dataclass(frozen=True)
class Fewer:
    """Other ranks than a run was meant for."""

    layout: Layout
    ranks: int


def stand_by(directory: Path) -> int:
    """Of a rank that no layout has a place for: wait until the others have ended, or are told to; returns the exit
    code."""
    end_with_launcher()
    steps, over = read_directory(directory)[0].training.steps, Event()

    def wait() -> None:  # beside the main thread, which hears signals meanwhile
        with suppress(dist.DistError):
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            TCPStore(*address, is_master=False, timeout=timedelta(minutes=5)).wait(["over"], timedelta(days=365))
        over.set()

    Thread(target=wait, daemon=True).start()
    with on_signal(lambda _: over.set()):
        over.wait()
    return 0 if reached(directory, steps) else STOPPED


@dataclass
class _Life:
    """What is known of this rank by now, for whoever has to say how it ended."""

    directory: Path
    trainer: Trainer | None = None
    signals: list[int] = field(default_factory=list)

    def heard(self, number: int) -> None:
        """A signal: from the first step on all ranks settle together when to stop."""
        self.signals.append(number)
        if self.trainer is not None:
            self.trainer.asked_to_stop = True


def work(
    source: Path, overrides: list[str], resume: bool, measure: bool = False, window: range | None = None,
    fewer: Fewer | None = None, device: str | None = None,
) -> int:  # fmt: skip
    """Train on this rank; returns the exit code. `source` is a run directory, or a run file that rank 0 sets up.
    `measure` asks for what one step holds and sends, `window` for all that these steps do; `fewer` ranks may
    train than the run was meant for, and a launcher says on which `device`."""
    life = _Life(source)
    try:
        with on_signal(life.heard):
            _live(life, overrides, resume, measure, window, fewer, device)
    except SystemExit as ended:  # rank 0 says why
        return int(ended.code or 0)
    except BaseException as error:
        return _failed(life, error)
    trainer = life.trainer
    if trainer is not None and trainer.stop and trainer.step < trainer.run.training.steps:
        by_hand = life.signals[:1] == [signal.SIGINT] and LAUNCHER not in os.environ  # a launcher says so itself
        return INTERRUPTED if by_hand else STOPPED
    return 0


def _live(
    life: _Life, overrides: list[str], resume: bool, measure: bool, window: range | None, fewer: Fewer | None,
    device_type: str | None,
) -> None:  # fmt: skip
    source, prepared = life.directory, life.directory.is_dir()
    if prepared and overrides:
        raise UserError("--set", overrides, "has no effect on a run directory", "give the run file instead")
    run = read_directory(source)[0] if prepared else load_run(source, overrides)
    if prepared:
        forget(source, own_rank())
    timeout_seconds = run.training.timeout_seconds
    device = join_ranks(device_type or choose_device(run), timeout_seconds, fewer.ranks if fewer else None)
    if not prepared:
        life.directory = _set_up_once(run, resume)
    directory = life.directory
    run, data = read_directory(directory)
    first = not dist.is_initialized() or dist.get_rank() == 0
    # Of a start before, a rank that lost the others notices it when a collective's time is over.
    patience = timeout_seconds if LAUNCHER in os.environ else ENDS_WITHIN_SECONDS
    launcher = int(os.environ.get(LAUNCHER, os.getpid()))
    lock = hold(directory, patience + ENDS_WITHIN_SECONDS, launcher) if first else None
    if fewer is not None:
        run = run.model_copy(update={"layout": fewer.layout})
        check_layout(run, fewer.ranks)
    if first:
        keep_layout(directory, fewer.layout if fewer else None)
        forget_from(directory, dist.get_world_size() if dist.is_initialized() else 1)
    fresh = not checkpoints(directory / "checkpoints")
    if measure or window:
        forget_measured(directory)  # of an earlier start, maybe of other ranks
    corpus, peak = open_corpus(run, data, fresh), device_peak(run, device)
    with Watchdog(directory, timeout_seconds) as watchdog:

        def begin() -> Trainer:
            watchdog.trainer = life.trainer = Trainer(run, corpus, directory, device, peak)
            life.trainer.asked_to_stop = bool(life.signals)  # by what was heard when there was no trainer
            return life.trainer

        _train_through(begin, run, directory, partial(_train, measure=measure, window=window), resume or prepared)
    if lock is not None:
        lock.close()


def _train_through(
    begin: Callable[[], Trainer], run: RunSpec, directory: Path, train: Callable[[Trainer, bool], None], resume: bool
) -> None:
    """Train, and where a loss is beyond repair go back and begin anew, as often as the run may."""
    allowed, usual = run.recovery.rollbacks, Losses(run.recovery.spike)
    left = allowed and allowed - told_by_first(partial(rollbacks, directory))
    while True:
        trainer = begin()
        trainer.usual = usual if left > 0 else Losses(None)
        try:
            return train(trainer, resume)
        except DivergenceError as error:
            if left < 1 or isinstance(error, CorruptionError):
                raise
            left, resume = left - 1, True
            _go_back(trainer, error)


def _failed(life: _Life, error: BaseException) -> int:
    """Leave word of a failure, for a launcher where there is one; returns the exit code."""
    trainer = life.trainer
    rank, step = (trainer.mesh.rank, trainer.step) if trainer else (own_rank(), 0)
    if life.directory.is_dir():
        memory, final = account(error, trainer), isinstance(error, DivergenceError)
        write_failure(life.directory, rank, step, error, memory, final)
    if LAUNCHER not in os.environ:
        for_people = isinstance(error, UserError | DivergenceError)
        print(f"phalanx: rank {rank} failed after step {step}: {error}", file=sys.stderr)
        if not for_people:
            traceback.print_exc()
    return 2 if isinstance(error, UserError) else 1


def _go_back(trainer: Trainer, error: DivergenceError) -> None:
    """Settle from where another trainer goes on: the newest checkpoint, or the one before where that has led astray
    twice. Raises the error where there is none before."""
    directory, kept = trainer.directory, trainer.checkpointer.directory
    newest = newest_step(kept)
    before = newest if told_by_first(partial(led_astray, directory, newest)) else None
    checkpoint, _ = newest_checkpoint(kept, before)
    if before is not None and checkpoint is None:
        raise error
    to = step_of(checkpoint) if checkpoint else 0
    if trainer.is_main:
        if before is not None:
            set_aside(kept, [step_name(before)], checkpoint)
        roll_back(directory, trainer.step, to, str(error))
        passed = f"the text of steps {to + 1} to {trainer.step} is passed over"
        print(f"phalanx: {error}\n  going back to step {to}; {passed}", file=sys.stderr)
    if dist.is_initialized():
        dist.barrier()


def _set_up_once(run: RunSpec, resume: bool) -> Path:
    """Under torchrun nobody was there before the ranks: rank 0 sets up, the others wait."""
    if not dist.is_initialized():
        return set_up(run, 1, resume)
    # Through the store, not a collective: tokenizing may take longer than any collective should.
    store, key = dist.distributed_c10d._get_default_store(), "phalanx/run directory"
    if dist.get_rank() == 0:
        try:
            directory = set_up(run, dist.get_world_size(), resume)
        except BaseException:
            store.set(key, "")
            raise
        store.set(key, str(directory))
        return directory
    store.wait([key], timedelta(days=1))
    made = store.get(key).decode()
    if not made:
        raise SystemExit(2)
    return Path(made)


def device_peak(run: RunSpec, device: torch.device) -> float | None:
    """Peak FLOP/s of one rank: as the run file says, of the GPU's preset, or measured on a CPU; None if unknown."""
    bf16 = run.training.precision == "bf16"
    on_cpu, cluster = device.type == "cpu", run.cluster
    if cluster.peak_flops and cluster.measured and cluster.measured.precision == run.training.precision:
        return cluster.peak_flops / cluster.crowd  # of this machine, by `phalanx calibrate`
    if cluster.peak_flops and (not cluster.preset or (bf16 and not on_cpu)):
        return cluster.peak_flops
    if on_cpu:
        return peak_flops(device, COMPUTE[run.training.precision])
    words = torch.cuda.get_device_name(device).upper().replace("-", " ").split()
    known = [name for name in preset_names("machines") if name.upper() in words]
    slower = {"PCIE", "NVL"} & set(words)  # the presets are the SXM cards
    return load_machine(known[0]).peak_flops if known and bf16 and not slower else None


def _train(trainer: Trainer, resume: bool, *, measure: bool, window: range | None) -> None:
    run, directory = trainer.run, trainer.directory
    quiet = not trainer.is_main
    resumed, damaged = trainer.resume() if resume else (0, {})
    config, alive_until = run.model_dump(mode="json"), last_written(directory / METRICS_FILE)
    logs = [] if quiet else open_logs(directory, trainer.step, run.metrics.wandb, run.name, config)
    notes = open_notes(trainer) if run.metrics.record else None
    looked_at = window_of(trainer, measure, window)
    if trainer.is_main:
        launcher = int(os.environ.get(LAUNCHER, "0"))
        ranks = trainer.mesh.degrees.world_size
        note(directory, BEGAN, ranks=ranks, step=trainer.step, launcher=launcher, alive_until=alive_until)
    failed = True
    try:
        with Progress(trainer.step, run.training.steps, quiet) as progress:
            for name, problem in damaged.items():
                progress.note(f"checkpoint {name} is damaged and was set aside: {problem}")
                if trainer.is_main:
                    note(directory, SET_ASIDE, checkpoint=name, problem=problem)
            progress.note(opening(trainer, resumed))
            if window is not None and not looked_at:
                progress.note(f"no step is looked at closely: {window[0]} to {window[-1]} are done, or too many")
            closely = Closely(trainer, looked_at) if looked_at else None
            if closely is not None and closely.metered is None:
                progress.note(f"memory is not metered: step {closely.settled} is the first that is like all after it")
            evaluation = trainer.train(logs, progress, closely, notes)
        failed = False
        if trainer.is_main:
            note(directory, ENDED, step=trainer.step)
    finally:
        for log in [*logs, *([notes] if notes else [])]:
            log.close(failed)
    text = sample(trainer) if run.evaluation.prompt and not trainer.stop else ""
    if trainer.is_main:
        print(closing(trainer, evaluation, text))
        if measure:
            print(compare(run, trainer.mesh.degrees.world_size, directory))


def window_of(trainer: Trainer, measure: bool, window: range | None) -> range:
    """The steps to look at closely: of `window` those that are to be done, or the one that `measure` asks for."""
    if window is None:
        first = trainer.step + measured_number(trainer.run)
        return range(first, first + measure)
    return range(max(window.start, trainer.step + 1), min(window.stop, trainer.run.training.steps + 1))


def open_notes(trainer: Trainer) -> Log:
    """Where this rank notes what it does, with its opening written."""
    file = record_file(trainer.directory, trainer.mesh.rank)
    offset = clock_offset(trainer.device, trainer.run.training.timeout_seconds)
    file.parent.mkdir(exist_ok=True)
    notes = JsonLines(file, trainer.step, FLUSH_SECONDS)
    opening: Opening = {
        "format": FORMAT,
        "rank": trainer.mesh.rank,
        "ranks": trainer.mesh.degrees.world_size,
        "host": socket.gethostname(),
        "device": trainer.device.type,
        "step": trainer.step,
        "clock_offset_seconds": offset.seconds,
        "clock_error_seconds": offset.error_seconds,
        "memory_bytes": device_memory_bytes(trainer.device),
    }
    if trainer.device.type == "cpu":
        opening["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    notes.write(dict(opening))
    return notes
