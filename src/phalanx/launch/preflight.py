"""Checks of a run before any process is started: layout, disk, memory, loggers and the run directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from phalanx.cost.exact.cuda_process import CONTEXT_BYTES
from phalanx.cost.exact.layout_checks import check_layout
from phalanx.cost.exact.model_state import checkpoint_space_needed_bytes
from phalanx.cost.exact.rank_memory import disk_offload_bytes, rank_model_states, worker_memories
from phalanx.debug.oom import physical_memory_bytes
from phalanx.launch.component_checks import check_component
from phalanx.runs.checkpoint_store import check_store_access, list_in_run_directory
from phalanx.runs.checkpoints import CHECKPOINTS_DIR, abandon_newer, check_manifest, check_not_all_damaged, checkpoints
from phalanx.runs.create import (
    check_claimable,
    claim_run_directory,
    directory_not_writable,
    latest_manifest,
    run_directory,
)
from phalanx.runs.lock import LAUNCHER_LOCK_FILE, SHUTDOWN_GRACE_SECONDS, acquire_run_lock, check_not_running
from phalanx.runs.metrics import METRICS_FILE
from phalanx.spec.components import named_components
from phalanx.spec.errors import LocalNodeError, UserError
from phalanx.spec.extras import missing_package
from phalanx.spec.formatting import format_gb_or_mb, plural
from phalanx.spec.phases import errors_of_phase, other_phases
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import BYTES_VOCAB, KeepSpec, RunSpec, require_settings_of_weights
from phalanx.spec.torch_compat import check_torch_supports

MIN_SEQ_LEN = 16
"""Minimum sequence length that is suggested."""
MAX_SEARCHED_LAYERS = 120
"""Maximum number of layers in the search for settings that fit (a multiple of common pipeline sizes). Deeper models are
searched with this number of layers."""


def preflight(resolved: ResolvedRun, resume: bool, step: int | None = None) -> None:
    """Raise UserError for errors that would stop this run later.

    Data is checked by `prepare`. No files are changed. Unless the run resumes, from `step` if given, its directory must
    not contain a run.
    """
    run = resolved.run
    check_settings(resolved)
    _check_directory(run, resume, step)
    # Ranks of other nodes detect a lost rank when a collective times out.
    peer_timeout_seconds = run.training.collective_timeout_seconds if resume and run.cluster.nodes > 1 else 0
    check_not_running(run_directory(run), SHUTDOWN_GRACE_SECONDS + peer_timeout_seconds)


def check_settings(resolved: ResolvedRun) -> None:
    """Raise UserError for settings that would stop a run, whatever its directory."""
    run = resolved.run
    check_layout(resolved)
    for phase in other_phases(run):
        with errors_of_phase(phase):
            check_layout(ResolvedRun(phase.run, resolved.world_size))
    check_torch_supports(run.layout)
    require_settings_of_weights(run)
    check_vocab_size(run, {"bytes": BYTES_VOCAB, "bpe": run.data.tokenizer_vocab}.get(run.data.tokenizer, 0))
    if run.recovery.in_memory_checkpoint_every:
        _check_copies(resolved)
    if run.metrics.wandb is not None:
        check_wandb(run.metrics.wandb)
    for field, component in named_components(run):
        check_component(field, component)
    if run.layout.activation_checkpointing == "offload":
        needed_bytes = (
            resolved.world_size / run.cluster.nodes * max(memory.host for memory in worker_memories(resolved))
        )
        memory_bytes = physical_memory_bytes()
        if needed_bytes > memory_bytes:
            problem = (
                f"needs {format_gb_or_mb(needed_bytes)} of CPU memory; this machine has {format_gb_or_mb(memory_bytes)}"
            )
            fix = 'lower layout.micro_batch_size or layout.recomputed_blocks, or use "full"'
            raise LocalNodeError("layout.activation_checkpointing", "offload", problem, fix)
    if run.layout.offload_directory is not None:
        _check_offload(resolved, run.layout.offload_directory)


def check_vocab_size(run: RunSpec, num_tokens: int) -> None:
    """Raise UserError if the tokenizer has more tokens than the model."""
    if run.model.vocab_size >= num_tokens:
        return
    problem = f"is less than the tokenizer's {num_tokens} tokens"
    fix = f"set model.vocab_size = {num_tokens}"
    if run.model.from_hf:
        fix += "; the embeddings of new tokens are initialized to the mean of the existing ones"
    raise UserError("model.vocab_size", run.model.vocab_size, problem, fix)


def _check_copies(resolved: ResolvedRun) -> None:
    run = resolved.run
    state_bytes = max(state.parameters + state.optimizer for state in rank_model_states(resolved))
    copies = 2 if run.cluster.nodes == 1 else 4
    needed_bytes = copies * state_bytes * resolved.world_size / run.cluster.nodes
    machine_bytes = physical_memory_bytes()
    if not hasattr(os, "memfd_create"):
        problem = "requires memfd_create, which this system does not have"
    elif run.layout.offload == "nvme":
        problem = 'cannot be combined with layout.offload = "nvme": its copies would keep the offloaded state in memory'
    elif needed_bytes > machine_bytes:
        needed = f"needs {needed_bytes / 1e9:.1f} GB for {copies} copies of each state"
        problem = f"{needed}; this machine has {machine_bytes / 1e9:.1f} GB"
    else:
        return
    fix = "set recovery.in_memory_checkpoint_every to 0"
    raise UserError("recovery.in_memory_checkpoint_every", run.recovery.in_memory_checkpoint_every, problem, fix)


def _check_offload(resolved: ResolvedRun, directory: str) -> None:
    path = Path(directory).expanduser()
    fix = "set layout.offload_directory to a writable directory on a local disk"
    if not path.is_dir():
        raise UserError("layout.offload_directory", directory, "is not a directory on this machine", fix)
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError("layout.offload_directory", directory, "is not writable", fix)
    free_bytes = shutil.disk_usage(path).free
    needed_bytes = resolved.world_size / resolved.run.cluster.nodes * disk_offload_bytes(resolved)
    if needed_bytes > free_bytes:
        problem = f"needs {needed_bytes / 1e9:.2f} GB for optimizer state, but has {free_bytes / 1e9:.2f} GB free"
        raise UserError("layout.offload_directory", directory, problem, fix)


def check_memory_of_phases(run: RunSpec, nproc: int, memory_bytes: int, device: str) -> None:
    """Check the memory of a run (`check_memory`) in each of its phases."""
    check_memory(run, nproc, memory_bytes, device)
    for phase in other_phases(run):
        on_cluster = on_machine(phase.run, nproc, memory_bytes, device)
        planned_bytes = _planned_bytes(on_cluster, device)
        if planned_bytes > memory_bytes:
            machine = f"{format_gb_or_mb(memory_bytes)} of this {'machine' if device == 'cpu' else 'GPU'}"
            fix = f"lower phase[{phase.number}].micro_batch_size or seq_len, or recompute activations"
            problem = f"exceeds the {machine} in {phase.name}"
            fix += " (layout.activation_checkpointing); or try with --force"
            raise LocalNodeError("planned memory", format_gb_or_mb(planned_bytes), problem, fix)


def check_memory(run: RunSpec, nproc: int, memory_bytes: int, device: str) -> None:
    """Check that the ranks of one machine have their planned peak memory.

    `memory_bytes` is the memory of each rank on a "cuda" device, or of all together on a "cpu". Raises UserError if the
    memory is insufficient. The message suggests settings that fit.
    """
    run = on_machine(run, nproc, memory_bytes, device)
    planned_bytes = _planned_bytes(run, device)
    if planned_bytes <= memory_bytes:
        return
    from phalanx.plan.advice.oom import changed_settings

    fitting = _find_fitting_run(run, memory_bytes, planned_bytes, device)
    options = " ".join(f"--set {setting}" for setting in changed_settings(run, fitting)) if fitting else ""
    ranks = plural(nproc, "rank") if device == "cpu" else "the rank that needs the most"
    problem = f"exceeds the {format_gb_or_mb(memory_bytes)} of this {'machine' if device == 'cpu' else 'GPU'} ({ranks})"
    fix = f"{options or 'use a smaller model or more machines'} (see phalanx advise oom), or try with --force"
    raise LocalNodeError("planned memory", format_gb_or_mb(planned_bytes), problem, fix)


def on_machine(run: RunSpec, nproc: int, memory_bytes: int, device: str) -> RunSpec:
    """Return the run on a machine of known memory.

    `memory_bytes` is the memory of each rank on a "cuda" device, or of all together on a "cpu".
    """
    cores = {"cores": run.cluster.cores or os.cpu_count()} if device == "cpu" else {}
    machine = {"device": device, "nproc_per_node": nproc, "memory_bytes": memory_bytes, **cores}
    return run.replace(cluster=run.cluster.replace(**machine))


def _find_fitting_run(run: RunSpec, memory_bytes: int, planned_bytes: float, device: str) -> RunSpec | None:
    """Return the run with settings that fit the memory; None if none are found.

    The search plans about 70 runs, which takes too long for a model deeper than `MAX_SEARCHED_LAYERS`. It then uses a
    model of fewer layers in proportionally less memory, and the result is planned once with all layers.
    """
    if run.model.num_layers <= MAX_SEARCHED_LAYERS:
        return _search_fitting_run(run, memory_bytes, device)
    from phalanx.plan.search.oom_risk import SAFE_OOM_PROBABILITY, enough_bytes, process_bytes

    # Unchecked, because fields may name layers that the sample does not have.
    model = run.model.model_copy(update={"num_layers": MAX_SEARCHED_LAYERS})
    sample = run.replace(model=model)
    # The sample may be invalid, such as a pipeline with more stages than the sample has layers.
    with suppress(UserError):
        fraction = _planned_bytes(sample, device) / planned_bytes
        sharing_ranks = (run.cluster.nproc_per_node or 1) if device == "cpu" else 1
        # The memory of libraries does not shrink with the model.
        library_bytes = process_bytes(run.cluster, 0) / enough_bytes(run.cluster, 1.0, SAFE_OOM_PROBABILITY)
        sample_bytes = fraction * memory_bytes + (1 - fraction) * sharing_ranks * library_bytes
        cluster = run.cluster.replace(memory_bytes=round(sample_bytes))
        fitting_sample = _search_fitting_run(sample.replace(cluster=cluster), fraction * memory_bytes, device)
        if fitting_sample is not None:
            fitting = fitting_sample.replace(model=run.model, cluster=run.cluster)
            return fitting if _planned_bytes(fitting, device) <= memory_bytes else None
    return None


def _search_fitting_run(run: RunSpec, memory_bytes: float, device: str) -> RunSpec | None:
    from phalanx.plan.advice.oom import cheapest_sequence, evaluate_single_remedies, run_footprint

    needed_remedies = cheapest_sequence(run, run_footprint(run), evaluate_single_remedies(run))[1]
    remedied_run = (needed_remedies[-1].run or run) if needed_remedies else run
    candidates = (*_shorten_sequences(remedied_run), *_shorten_sequences(run))
    return next((candidate for candidate in candidates if _planned_bytes(candidate, device) <= memory_bytes), None)


def _planned_bytes(run: RunSpec, device: str) -> float:
    """Return the planned memory in bytes on "cpu" or "cuda".

    On "cpu" it is the sum over all ranks of this machine, with offloaded state. On "cuda" it is the maximum over ranks
    of their GPU memory, with the driver's context.
    """
    if device == "cuda":
        return CONTEXT_BYTES + max(memory.device for memory in worker_memories(ResolvedRun.on_cluster(run)))
    rank_bytes = [memory.total + memory.host for memory in worker_memories(ResolvedRun.on_cluster(run))]
    return (run.cluster.nproc_per_node or 1) * sum(rank_bytes) / len(rank_bytes)


def _shorten_sequences(run: RunSpec) -> Iterator[RunSpec]:
    """Yield the run, and the run with 1/2, 1/4, ... of its sequence length while a plan exists."""
    yield run
    seq_len = run.training.seq_len // 2
    while seq_len >= MIN_SEQ_LEN:
        with suppress(UserError):
            shorter = run.replace(training=run.training.replace(seq_len=seq_len))
            check_layout(ResolvedRun.on_cluster(shorter))
            yield shorter
        seq_len //= 2


def _check_directory(run: RunSpec, resume: bool, step: int | None) -> None:
    directory = run_directory(run)
    existing_parent = directory
    while not existing_parent.exists():
        existing_parent = existing_parent.parent
    if not existing_parent.is_dir() or not os.access(existing_parent, os.W_OK | os.X_OK):
        problem = "is not a writable directory"
        raise UserError("output_dir", str(existing_parent), problem, "set output_dir to another directory")
    check_claimable(directory)
    if run.checkpoint.directory is not None:
        check_store_access(run, resume)
        if resume:
            list_in_run_directory(run, directory)
    saved_checkpoints = checkpoints(directory / CHECKPOINTS_DIR, step)
    if saved_checkpoints and resume:
        check_manifest(run, latest_manifest(saved_checkpoints))
    elif resume:
        check_not_all_damaged(directory / CHECKPOINTS_DIR)
    elif saved_checkpoints or (directory / METRICS_FILE).exists():
        fix = "add --resume to continue this run, or choose another name with --set name=..."
        raise UserError("name", run.name, f"belongs to a run, in {directory}", fix)
    needed_bytes = checkpoint_space_needed_bytes(run, len(saved_checkpoints))
    free_bytes = shutil.disk_usage(existing_parent).free
    if needed_bytes > free_bytes:
        kept = run.checkpoint.keep
        fewer = "keep fewer checkpoints (checkpoint.keep), " if kept != KeepSpec(last=1) else ""
        free = f"{existing_parent} has {format_gb_or_mb(free_bytes)} free"
        problem = f"needs {format_gb_or_mb(needed_bytes)} for checkpoints, but {free}"
        fix = f"free space, {fewer}or set output_dir to another disk"
        raise UserError("checkpoint.keep", kept.model_dump(exclude_defaults=True) or None, problem, fix)


def lock_run_directory(run: RunSpec, resume: bool, step: int | None = None) -> IO[str] | None:
    """Lock the directory of a run for its launcher; return None if the file system has no locks.

    If the run continues from the checkpoint of a step, newer ones are renamed. The lock is held from before the first
    write until the launcher exits, also if it becomes the rank itself (exec). Raises UserError if another launcher has
    the lock, or has trained in the directory since the run was checked.
    """
    directory = run_directory(run)
    claim_run_directory(directory)
    try:
        lock = acquire_run_lock(directory, name=LAUNCHER_LOCK_FILE)
    except OSError as error:
        raise directory_not_writable(directory, error) from None
    _check_directory(run, resume, step)
    if step is not None:
        abandon_newer(directory, step)
    if lock is not None:
        os.set_inheritable(lock.fileno(), True)
    return lock


def check_wandb(project: str) -> None:
    """Raise UserError if W&B is not installed."""
    module_spec = find_spec("wandb")
    # A directory of this name without a module is one that W&B has created.
    if module_spec is None or module_spec.origin is None:
        raise missing_package("metrics.wandb", project, "wandb")
