"""Creation of a run: check it, prepare its data, and write its directory."""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from phalanx.data.bad_records import BAD_RECORDS_FILE, describe_bad_records
from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.loader import StepLoader, TokenLoader
from phalanx.data.mixture_loader import MixtureLoader, describe_mixtures
from phalanx.data.packing import MAX_IDS, has_weights
from phalanx.data.pair_metadata import has_whole_documents
from phalanx.data.phased_loader import open_phases, open_token_files
from phalanx.data.prepare import PreparedData, prepare
from phalanx.data.source_checks import describe_unchecked_pairs, long_held_out, naming_text
from phalanx.data.tokenizer import load_tokenizer
from phalanx.data.whole_documents import pack_whole
from phalanx.launch.preflight import check_memory_of_phases, check_vocab_size, preflight
from phalanx.launch.process import query_gpus, select_device
from phalanx.launch.recomputation import machine_memory_bytes, resolve_recomputation
from phalanx.runs.checkpoints import CHECKPOINTS_DIR, checkpoints, step_of
from phalanx.runs.create import (
    RUN_FILE,
    TOKENIZER_FILE,
    latest_manifest,
    read_run_directory,
    run_directory,
    write_run_directory,
)
from phalanx.runs.events import read_events
from phalanx.runs.reference_log_probs import require_reference
from phalanx.spec.errors import UserError
from phalanx.spec.families.config_json import hf_config
from phalanx.spec.files.load import load_run
from phalanx.spec.files.write import with_absolute_paths
from phalanx.spec.formatting import plural
from phalanx.spec.learning_rate import learning_rate_note
from phalanx.spec.mixture import shares_of_weights
from phalanx.spec.phases import Phase, errors_of_phase, phase_at, phases_of, rate_spans
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.spec.small_run_defaults import unset_choices_of_large_model
from phalanx.train.optim.optimizers import learning_rate_ratio
from phalanx.train.profiling.peak_flops import fastest_precision
from phalanx.train.teacher import with_checked_teacher
from phalanx.train.time_budget import with_decided_steps

logger = logging.getLogger(__name__)
MIN_USED_VOCABULARY = 0.8
"""Share of the model's vocabulary below which the tokenizer's size is noted."""


def create_run(run: RunSpec, world_size: int, resume: bool) -> Path:
    """Check a run, prepare its data, and write its directory; return the directory.

    Raises UserError if the run cannot work; then nothing is written."""
    run = decide_recomputation(decide_choices(run, resume), world_size)
    return write_run_directory(*check_and_prepare(run, world_size, resume))


def decide_choices(run: RunSpec, resume: bool) -> RunSpec:
    """Return a run with the faster precision, and without compilation if it cannot work, where the file leaves it open.

    A resumed run keeps the choices of its first start: its precision, the steps of `training.seconds`, and the
    checkpoint of its teacher."""
    file = run_directory(run) / RUN_FILE
    recorded_run = None
    if resume and file.exists():
        with suppress(UserError):
            recorded_run = load_run(file, environment={})
    if recorded_run is not None:
        run = _with_recorded_teacher(run, recorded_run)
    if recorded_run is not None and run.training.seconds is not None and recorded_run.training.has_decided_steps:
        steps = recorded_run.training.steps
        _log_note(f"training.seconds applies to new runs only; this run keeps the {steps} steps of its first start")
        run = with_decided_steps(run, steps)
    if run.training.compile is None and run.on_device(select_device(run)).compiles and not find_c_compiler():
        _log_note("blocks are not compiled, which needs a C compiler: install gcc or clang")
        run = run.replace(training=run.training.replace(compile=False))
    if not run.training.auto_precision:
        return run
    precision = recorded_run.training.precision if recorded_run else fastest_precision(torch.device(select_device(run)))
    training = run.training.replace(precision=precision, auto_precision=False)
    return run.replace(training=training)


def _with_recorded_teacher(run: RunSpec, recorded: RunSpec) -> RunSpec:
    """Return a run with the checkpoint of its teacher that a recorded run has, if it names none."""
    distillation = with_absolute_paths(run).distillation
    if distillation is None or distillation.step is not None or run.distillation is None:
        return run
    if recorded.distillation is None or recorded.distillation.teacher != distillation.teacher:
        return run
    return run.replace(distillation=run.distillation.replace(step=recorded.distillation.step))


def find_c_compiler() -> str | None:
    """Return the C compiler that Triton uses for kernels on GPUs, or None."""
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    return next((path for name in names if (path := shutil.which(name))), None)


def decide_recomputation(run: RunSpec, world_size: int, nproc: int | None = None) -> RunSpec:
    """Return a run with the recomputation that fits this machine if the run file leaves it open.

    `nproc` is the number of ranks on this machine; by default equally many on each node of the run's cluster."""
    if not run.layout.auto_checkpointing:
        return run
    device = select_device(run)
    gpu_memory_bytes = _gpu_memory_bytes() if device == "cuda" else None
    resolved = resolve_recomputation(run.on_device(device), world_size, gpu_memory_bytes, nproc)
    return run.replace(layout=resolved.layout)


def check_machine_memory(run: RunSpec, nproc: int) -> None:
    """Raise UserError if `nproc` ranks need more memory than this machine or this process's cgroup has."""
    if select_device(run) == "cuda":
        memory_bytes = run.cluster.memory_bytes or _gpu_memory_bytes()
        if memory_bytes is not None:
            check_memory_of_phases(run, nproc, memory_bytes, "cuda")
    else:
        check_memory_of_phases(run, nproc, machine_memory_bytes(), "cpu")


def _gpu_memory_bytes() -> int | None:
    """Return the memory of the smallest GPU, without a CUDA context in this process; None if unknown."""
    sizes_mib = query_gpus("memory.total")
    return int(min(sizes_mib)) * 2**20 if sizes_mib else None


def check_and_prepare(
    run: RunSpec, world_size: int, resume: bool, progress: Callable[..., None] | None = None, step: int | None = None
) -> tuple[RunSpec, PreparedData]:
    """Check a run that may resume, from `step` if given, and prepare its data. Raises UserError if it cannot work.

    The result has the steps of `training.epochs`, and the step of a teacher's checkpoint."""
    preflight(ResolvedRun(run, world_size), resume, step)
    saved_checkpoints = checkpoints(run_directory(run) / CHECKPOINTS_DIR, step) if resume else []
    if not saved_checkpoints:
        if resume:
            _log_note(f"no checkpoint in {run_directory(run)} yet: starting from step 0")
        # Before the text is tokenized, which takes minutes even for a small run.
        _log_note(unset_choices_of_large_model(run)[1])
    with offer_recorded_tokens(run, resume):
        # The paths are still those that the user wrote, because errors quote them.
        prepared = prepare(run.data, progress)
    _log_note(describe_unchecked_pairs(run.data))
    if prepared.bad_records:
        _log_note(f"{describe_bad_records(prepared.bad_records)} ({BAD_RECORDS_FILE} of the run lists them)")
    manifest = latest_manifest(saved_checkpoints) if saved_checkpoints else None
    decided = _decide_epochs(run, prepared, world_size, manifest)
    _check_tokens(with_absolute_paths(decided), prepared, world_size, manifest)
    decided = with_checked_teacher(decided, load_tokenizer(prepared.tokenizer))
    run = with_absolute_paths(decided)
    if manifest is not None:
        if run.preference is not None:
            require_reference(run_directory(run))
        for note in _describe_changes(run, manifest, world_size):
            _log_note(note)
        _log_note(_describe_schedule_change(run, step_of(saved_checkpoints[0])))
        return decided, prepared
    if run.model.implementation is None:
        try:
            hf_config(run.model.without_tuning)
        except UserError as error:
            reason = f"{error.field} = {error.value!r} {error.problem} ({error.fix})"
            _log_note(f"this model cannot be exported to Hugging Face: {reason}")
    _log_note(learning_rate_note(run))
    if run.model.from_hf:
        from phalanx.train.training_data import initial_weights

        initial_weights(run)
    return decided, prepared


def _decide_epochs(run: RunSpec, prepared: PreparedData, world_size: int, manifest: dict[str, Any] | None) -> RunSpec:
    """Return the run with the number of steps that read its text as often as `training.epochs` says.

    Of a run that resumes from a checkpoint, perhaps with other batches, only the steps that are left are counted."""
    if run.training.epochs is None:
        return run
    train = IndexedDataset(prepared.train) if prepared.train else None
    sources = [IndexedDataset(source) for source in prepared.sources]
    loader = open_token_files(run, train, sources, ResolvedRun(run, world_size).batch.global_batch_size)
    if manifest is not None:
        _resume_loader(loader, run, prepared, manifest)
    steps = max(loader.steps_of_epochs(Fraction(str(run.training.epochs))), manifest["step"] if manifest else 0)
    if not steps:
        problem = f"is less than one step of {run.training.tokens_per_step:,} tokens"
        fix = "set more epochs, or a smaller training.tokens_per_step, or add text"
        raise UserError("training.epochs", run.training.epochs, problem, fix)
    _log_note(f"training.epochs = {run.training.epochs:g}: {plural(steps, 'step')}")
    return with_decided_steps(run, steps)


def _log_note(line: str | None) -> None:
    if line is not None:
        logger.info("%s", line)


@contextmanager
def offer_recorded_tokens(run: RunSpec, resume: bool) -> Iterator[None]:
    """Extend errors about the text of a resumed run by a fix with its tokens, which may outlive the text."""
    try:
        yield
    except UserError as error:
        if resume and error.field.startswith(("data.train", "data.held_out", "data.source")):
            error.fix += _suggest_recorded_tokens(run_directory(run).absolute(), None)
        raise


def _describe_changes(run: RunSpec, manifest: dict[str, Any], world_size: int) -> Iterator[str]:
    """Yield what a run that resumes on other ranks, with another optimizer or with other batches carries over."""
    layout = list(_changed_layout(run, manifest["world_size"], world_size))
    if layout:
        yield f"{', '.join(layout)}: weights, optimizer state and the position in the text are carried over"
    if manifest["optimizer"] != run.optimizer.name:
        kept = "the weights are kept, and the state that both optimizers have; the rest starts from zero"
        yield f"optimizer.name {manifest['optimizer']} -> {run.optimizer.name}: {kept}"
    saved = manifest["loader"]
    current = phase_at(phases_of(run), manifest["step"]).run
    seq_len = current.training.seq_len
    sequences = ResolvedRun(current, world_size).batch.global_batch_size
    if saved.get("sequence", seq_len) != seq_len:
        yield f"training.seq_len {saved['sequence']} -> {seq_len}: the text starts a new epoch"
    elif saved.get("sequences_per_step", sequences) != sequences:
        change = f"{saved['sequences_per_step']} -> {sequences} sequences per update"
        yield f"{change}: the text continues after the last sequence of the checkpoint"
    sources = current.data.source
    shares = shares_of_weights([source.weight for source in sources])
    if saved.get("shares", {}) != {source.name: str(share) for source, share in zip(sources, shares, strict=True)}:
        yield "data.source has other shares: each source continues after what the run has read of it"


def _changed_layout(run: RunSpec, ranks_before: int, ranks: int) -> Iterator[str]:
    """Yield the changes of the number of ranks and of the layout since the last start of a run."""
    if ranks != ranks_before:
        yield f"{plural(ranks_before, 'rank')} -> {ranks}"
    events = reversed(read_events(run_directory(run)))
    before: dict[str, Any] = next((event["settings"] for event in events if "settings" in event), {})
    now = run.settings
    for name in sorted(before.keys() | now.keys() if before else ()):
        if name.startswith("layout.") and before.get(name) != now.get(name):
            yield f"{name} {before.get(name)} -> {now.get(name)}"


def _describe_schedule_change(run: RunSpec, step: int) -> str | None:
    """Describe the jump of the learning rate if a run resumes with a changed schedule.

    None if the rate does not jump."""
    with suppress(UserError):
        # The recorded run is only compared, so its components need no trust.
        recorded_run = load_run(run_directory(run) / RUN_FILE, environment={}, trust=True)
        if not (recorded_run.training.has_decided_steps and run.training.has_decided_steps):
            return None
        # The launcher does not run the user's code.
        if recorded_run.optimizer.lr_function or run.optimizer.lr_function:
            return None
        old_rate, same_step_rate = (_unscaled_learning_rate(spec, step - 1) for spec in (recorded_run, run))
        if math.isclose(old_rate, same_step_rate):
            return None
        before = recorded_run.settings
        now = run.settings
        names = [name for name in (before | now) if name.startswith(("training.steps", "optimizer.", "phase."))]
        changes = ", ".join(
            f"{name} {before.get(name)} -> {now.get(name)}" for name in names if before.get(name) != now.get(name)
        )
        rates = f"{old_rate:.3g} at step {step} -> {_unscaled_learning_rate(run, step):.3g} at step {step + 1}"
        return f"{changes}: the learning rate follows the new schedule, {rates}"
    return None


def _unscaled_learning_rate(run: RunSpec, step: int) -> float:
    """Return the learning rate of a step (from 0), before it is scaled for the number of ranks."""
    return run.optimizer.learning_rate * learning_rate_ratio(rate_spans(run), step)


def _check_tokens(run: RunSpec, prepared: PreparedData, world_size: int, manifest: dict[str, Any] | None) -> None:
    """Raise UserError if the tokens do not suit the run.

    The text may be too short, the tokenizer may have more tokens than the model, or a checkpoint to resume from may be
    of another text."""
    tokenizer = load_tokenizer(prepared.tokenizer)
    num_tokens = tokenizer.vocab
    check_vocab_size(run, num_tokens)
    if num_tokens > MAX_IDS:
        raise UserError("data.tokenizer", run.data.tokenizer, f"has more than {MAX_IDS:,} tokens", "use another one")
    if manifest is None and not run.model.from_hf and num_tokens < MIN_USED_VOCABULARY * run.model.vocab_size:
        unused = f"the tokenizer has {num_tokens:,} tokens, and the model rows for {run.model.vocab_size:,}"
        _log_note(f"{unused}: set model.vocab_size = {num_tokens} for a smaller model")
    for number, prefix in enumerate(prepared.held_out_sources or (prepared.held_out,)):
        held_out = IndexedDataset(prefix)
        if held_out.size < 2:
            problem = f"leaves only {held_out.size} tokens for evaluation"
            fix = "add text, or increase data.held_out_fraction"
            if run.data.held_out_sets:
                name, text = list(run.data.held_out_sets.items())[number]
                raise UserError(f"data.held_out_sets.{name}", text, f"has only {held_out.size} tokens", "add text")
            if prepared.held_out_sources:
                fix = "add text, increase data.held_out_fraction, or set data.held_out"
                raise UserError(f"data.source[{number}].path", run.data.source[number].path, problem, fix)
            raise UserError("data.held_out", run.data.held_out or run.data.train, problem, fix)
    run_phases = phases_of(run)
    _check_held_out_conversations(run, prepared, run_phases)
    if not (prepared.train or prepared.sources):
        return
    train = IndexedDataset(prepared.train) if prepared.train else None
    sources = [IndexedDataset(source) for source in prepared.sources]
    loaders: dict[int, TokenLoader | MixtureLoader] = {}

    def open_phase(phase: Phase) -> TokenLoader | MixtureLoader:
        with errors_of_phase(phase):
            sequences = ResolvedRun(phase.run, world_size).batch.global_batch_size
            loaders[phase.first_step] = open_token_files(phase.run, train, sources, sequences)
        return loaders[phase.first_step]

    _check_weights(run, sources if train is None else [train])
    loader = open_phases(run_phases, open_phase)
    if manifest is not None:
        _resume_loader(loader, run, prepared, manifest)
    if not run.training.has_decided_steps:
        return
    step = manifest["step"] if manifest else 0
    # Phases that read alike have one loader.
    first = next(iter(loaders.values()))
    remaining = [(phase, loaders.get(phase.first_step, first)) for phase in run_phases if phase.end > step]
    mixtures = [(phase, loader) for phase, loader in remaining if isinstance(loader, MixtureLoader)]
    for phase, mixture in mixtures:
        with errors_of_phase(phase):
            mixture.check_epochs(phase.end)
    for line in describe_mixtures(mixtures, step):
        _log_note(line)


def _check_weights(run: RunSpec, datasets: Sequence[IndexedDataset]) -> None:
    """Raise UserError if answers have weights, and the loss is the user's, which sums over targets itself."""
    loss = run.training.loss
    for dataset in filter(has_whole_documents, datasets) if loss is not None else ():
        if loss is not None and any(has_weights(dataset.document(number)) for number in range(len(dataset))):
            problem = "cannot be combined with conversations that have weights other than 0 and 1"
            raise UserError("training.loss", loss.class_path, problem, "remove the weights, or training.loss")


def _check_held_out_conversations(run: RunSpec, prepared: PreparedData, run_phases: Sequence[Phase]) -> None:
    """Raise UserError if held-out conversations do not fit the sequences of a phase."""
    held_out = [IndexedDataset(prefix) for prefix in prepared.held_out_sources or (prepared.held_out,)]
    for dataset, too_long in zip(held_out, long_held_out(run.data), strict=True):
        for seq_len in {phase.run.training.seq_len for phase in run_phases} if has_whole_documents(dataset) else ():
            with naming_text(dataset.prefix, run.data.held_out or run.data.train):
                pack_whole(dataset, seq_len, too_long)


def _resume_loader(loader: StepLoader, run: RunSpec, prepared: PreparedData, manifest: dict[str, Any]) -> None:
    """Resume a loader from a checkpoint. An error about other text offers the tokens of the run's first start."""
    try:
        loader.resume(manifest["loader"])
    except UserError as error:
        if error.field == "data":
            directory = run_directory(run).absolute()
            suggestion = _suggest_recorded_tokens(directory, prepared)
            # A BPE is trained on the text of all sources, so that a new one changes the tokens of the others.
            if not suggestion and run.data.tokenizer == "bpe":
                suggestion = f"; or keep the run's tokenizer: --set data.tokenizer={directory / TOKENIZER_FILE}"
            error.fix += suggestion
        raise


def _suggest_recorded_tokens(directory: Path, prepared: PreparedData | None) -> str:
    """Return how to continue a run with the tokens of its first start, if they still exist."""
    with suppress(UserError, OSError):
        recorded_data = read_run_directory(directory)[1]
        if recorded_data.train and recorded_data != prepared:
            num_train_tokens, num_held_out_tokens = (
                IndexedDataset(prefix).size for prefix in (recorded_data.train, recorded_data.held_out)
            )
            return (
                f"; or use the {num_train_tokens:,} and {num_held_out_tokens:,} held-out tokens of the run: "
                f"--set data.train='[\"{recorded_data.train}\"]' "
                f"--set data.held_out='[\"{recorded_data.held_out}\"]' "
                f"--set data.tokenizer={directory / TOKENIZER_FILE}"
            )
    return ""
