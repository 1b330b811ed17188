"""One rank's life: join the others, train, say how it went."""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from phalanx.cost.parameters import parameters
from phalanx.cost.stages import check_layout
from phalanx.measure.events import BEGAN, ENDED, note
from phalanx.measure.incident import forget, forget_from
from phalanx.measure.lock import ENDS_WITHIN_SECONDS, hold
from phalanx.measure.matmul import computes_bf16, peak_flops
from phalanx.measure.memory import device_memory_bytes
from phalanx.measure.products import COMPUTE
from phalanx.measure.record import FORMAT, Opening, record_file
from phalanx.parallel.apply import computing
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
    write_failure,
)
from phalanx.train.manifest import checkpoints, reached, set_aside, step_name, step_of
from phalanx.train.measured import compare, forget_measured
from phalanx.train.metrics import JsonLines, Log, Record, open_logs
from phalanx.train.progress import Progress
from phalanx.train.setup import INTERRUPTED, STOPPED, read_directory, set_up
from phalanx.train.trainer import Trainer
from phalanx.train.watchdog import Watchdog

SAMPLE_TOKENS = 160
FLUSH_SECONDS = 1.0
"""What ranks note may be so late in their files: thousands of them may share a file system."""
PLACES = {"cpu": "CPU memory", "nvme": "files"}


@dataclass(frozen=True)
class Fewer:
    """Other ranks than a run was meant for."""

    layout: Layout
    ranks: int


def stand_by(directory: Path) -> int:
    """Of a rank that no layout has a place for: wait until the others have ended; returns the exit code."""
    end_with_launcher()
    steps = read_directory(directory)[0].training.steps
    with suppress(dist.DistError):
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        TCPStore(*address, is_master=False, timeout=timedelta(minutes=5)).wait(["over"], timedelta(days=365))
    return 0 if reached(directory, steps) else STOPPED


def work(
    source: Path, overrides: list[str], resume: bool, measure: bool = False, window: range | None = None,
    fewer: Fewer | None = None,
) -> int:  # fmt: skip
    """Train on this rank; returns the exit code. `source` is a run directory, or a run file that rank 0 sets up.
    `measure` asks for what one step holds and sends, `window` for all that these steps do; `fewer` ranks may
    train than the run was meant for."""
    directory = source
    trainer: Trainer | None = None
    try:
        prepared = source.is_dir()
        if prepared and overrides:
            raise UserError("--set", overrides, "has no effect on a run directory", "give the run file instead")
        run = read_directory(source)[0] if prepared else load_run(source, overrides)
        if prepared:
            forget(source, int(os.environ.get("RANK", "0")))
        device = join_ranks(choose_device(run), run.training.timeout_seconds, fewer.ranks if fewer else None)
        if not prepared:
            directory = _set_up_once(run, resume)
        run, data = read_directory(directory)
        first = not dist.is_initialized() or dist.get_rank() == 0
        # Of a start before, a rank that lost the others notices it when a collective's time is over.
        patience = run.training.timeout_seconds if LAUNCHER in os.environ else ENDS_WITHIN_SECONDS
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
        allowed = run.recovery.rollbacks
        left = allowed and allowed - told_by_first(partial(rollbacks, directory))
        usual = Losses(run.recovery.spike)
        signals: list[int] = []

        def heard(number: int) -> None:
            signals.append(number)
            if trainer is not None:
                trainer.asked_to_stop = True

        with Watchdog(directory, run.training.timeout_seconds) as watchdog, on_signal(heard):
            while True:
                watchdog.trainer = trainer = Trainer(run, corpus, directory, device, peak)
                trainer.usual = usual if left > 0 else Losses(None)
                if signals:  # by what was heard when there was no trainer
                    trainer.asked_to_stop = True
                try:
                    _train(trainer, resume or prepared, measure, window)
                    break
                except DivergenceError as error:
                    if left < 1 or isinstance(error, CorruptionError):
                        raise
                    left, resume = left - 1, True
                    _go_back(trainer, error)
                    watchdog.trainer = trainer = None
        if lock is not None:
            lock.close()
        if trainer.stop and trainer.step < run.training.steps:
            by_hand = signals[:1] == [signal.SIGINT] and LAUNCHER not in os.environ  # a launcher says so itself
            return INTERRUPTED if by_hand else STOPPED
    except SystemExit as ended:  # rank 0 says why
        return int(ended.code or 0)
    except BaseException as error:
        rank = trainer.mesh.rank if trainer else dist.get_rank() if dist.is_initialized() else 0
        step = trainer.step if trainer else 0
        if directory.is_dir():
            memory, final = account(error, trainer), isinstance(error, DivergenceError)
            write_failure(directory, rank, step, error, memory, final)
        if LAUNCHER not in os.environ:
            for_people = isinstance(error, UserError | DivergenceError)
            print(f"phalanx: rank {rank} failed after step {step}: {error}", file=sys.stderr)
            if not for_people:
                traceback.print_exc()
        return 2 if isinstance(error, UserError) else 1
    return 0


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


def _train(trainer: Trainer, resume: bool, measure: bool, window: range | None) -> None:
    run, directory = trainer.run, trainer.directory
    quiet = not trainer.is_main
    resumed, damaged = trainer.resume() if resume else (0, {})
    config = run.model_dump(mode="json")
    logs = [] if quiet else open_logs(directory, trainer.step, run.metrics.wandb, run.name, config)
    notes = open_notes(trainer) if run.metrics.record else None
    looked_at = window_of(trainer, measure, window)
    if trainer.is_main:
        note(directory, BEGAN, ranks=trainer.mesh.degrees.world_size, step=trainer.step)
    failed = True
    try:
        with Progress(trainer.step, run.training.steps, quiet) as progress:
            for name, problem in damaged.items():
                progress.note(f"checkpoint {name} is damaged and was set aside: {problem}")
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
    sample = _sample(trainer) if run.evaluation.prompt and not trainer.stop else ""
    if trainer.is_main:
        print(closing(trainer, evaluation, sample))
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


def opening(trainer: Trainer, resumed: int) -> str:
    """What a run says before its first step; `resumed` is how many ranks wrote what it goes on from, if it does."""
    run, cut, sizes = trainer.run, trainer.cut, trainer.mesh.degrees
    ranks = f"{counted(sizes.world_size)} ({trainer.device.type})"
    schedule = run.layout.schedule_file or run.layout.schedule
    names = {"pp": f"pipeline ({schedule})", "cp": run.layout.context, "tp": "tensor", "ep": "expert"}
    layout = "".join(f", {name} x {getattr(sizes, axis)}" for axis, name in names.items() if getattr(sizes, axis) > 1)
    layout += f", {run.layout.data}" if sizes.dp > 1 or sizes.servers else ""
    layout += f", state in {PLACES[run.layout.offload]}" if run.layout.offload != "none" else ""
    total = parameters(run.model).total
    train = trainer.corpus.train
    text = f"; the text is {train.size:,} tokens" if train is not None else ""
    lines = [
        f"{total:,} parameters on {ranks}{layout}, {run.training.precision}",
        f"{cut.sequences * run.training.sequence:,} tokens per update = {cut.micro_batch} sequences of "
        f"{run.training.sequence} x {counted(cut.dp)} x {cut.accumulation} accumulated"
        f"{', shared unevenly' if cut.sequences % cut.dp else ''}{text}",
    ]
    if run.training.precision == "bf16" and not computes_bf16(trainer.device):
        lines.append('this CPU computes bf16 in software, far slower than fp32: set training.precision = "fp32"')
    if cut.learning_rate != 1:
        lines.append(
            f"learning rates x {cut.learning_rate:.4g} ({run.training.scaling}): {counted(cut.dp)} instead of "
            f"{run.training.base_ranks}"
        )
    if resumed:
        others = f" of {counted(resumed)}" if resumed != sizes.world_size else ""
        lines.append(f"resumed after step {trainer.step}{others}")
        if trainer.step == run.training.steps:
            lines.append("that was the last: raise training.steps to go on")
    return "\n".join(lines)


def counted(ranks: int) -> str:
    """A number of ranks in words."""
    return f"{ranks} rank{'s' if ranks > 1 else ''}"


def closing(trainer: Trainer, evaluation: Record, sample: str) -> str:
    """What a run says at its end."""
    lines = []
    if evaluation:
        lines.append(
            f"held-out loss {evaluation['held_out_loss']:.4f} nats/token, "
            f"{evaluation['held_out_bits_per_byte']:.4f} bits/byte over {evaluation['held_out_tokens']:,} tokens"
        )
    if trainer.stop:
        lines.append(f"stopped by a signal after step {trainer.step}; continue with --resume")
    if sample:
        lines += ["sample:", "  " + sample.replace("\n", "\n  ")]
    return "\n".join([*lines, f"run directory: {trainer.directory}"])


def _sample(trainer: Trainer) -> str:
    """Text that the model continues from the run's prompt. Every rank takes part: the model may be split over them."""
    from phalanx.model.generate import generate

    run = trainer.run
    if run.layout.tp * run.layout.cp > 1:  # ranks know parts of logits, or of the text
        return f"(none: phalanx generate {trainer.directory} --prompt {run.evaluation.prompt!r})"
    if not trainer.strategy.computes:
        return _told("")
    tokenizer = trainer.corpus.tokenizer
    prompt = torch.from_numpy(tokenizer.encode_batch([run.evaluation.prompt])[0]).long().to(trainer.device)
    generator = torch.Generator(trainer.device).manual_seed(run.training.seed)
    trainer.module.eval()
    with torch.no_grad(), computing(trainer.strategy, run.training.precision, trainer.device):
        tokens = generate(
            trainer.strategy.model, prompt, SAMPLE_TOKENS, temperature=0.7, top_k=50, generator=generator,
            end=tokenizer.end, context=run.training.sequence,
        )  # fmt: skip
    return _told(tokenizer.decode(tokens.tolist()))


def _told(text: str) -> str:
    """What the last rank, which always computes, has to tell the first, which may not."""
    said = [text]
    if dist.is_initialized():
        dist.broadcast_object_list(said, src=dist.get_world_size() - 1)
    return said[0]
