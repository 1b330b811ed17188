"""Everything that can be checked and made before a process is spawned: the run directory, and the data in it.

RUN_DIR/run.toml          the whole run, resolved
RUN_DIR/data.json         where the tokens lie
RUN_DIR/tokenizer.json
RUN_DIR/metrics.jsonl     RUN_DIR/tensorboard/     RUN_DIR/checkpoints/     RUN_DIR/failures/
RUN_DIR/hangs/            RUN_DIR/launcher.lock    RUN_DIR/lock"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import tomli_w

from phalanx.cost.exact.pipeline_split import check_layout
from phalanx.cost.exact.rank_memory import checkpoint_space_needed_bytes, disk_offload_bytes, rank_model_states
from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.loader import TokenLoader
from phalanx.data.prepare import PreparedData, prepare
from phalanx.data.tokenizer import load_tokenizer
from phalanx.runs.checkpoints import check_manifest, check_not_all_damaged, checkpoints, read_manifest
from phalanx.runs.hang_dumps import FAILURES, HANGS
from phalanx.runs.lock import LAUNCHER_LOCK_FILE, SHUTDOWN_GRACE_SECONDS, acquire_run_lock, check_not_running
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import cluster_overrides, load_run
from phalanx.spec.run import RunSpec, plan_batch
from phalanx.spec.tokenizer import BYTES_VOCAB
from phalanx.spec.torch_compat import check_torch_supports
from phalanx.train.loggers import METRICS_FILE, check_wandb

EXIT_STOPPED = 75
"""Exit code (EX_TEMPFAIL of sysexits.h) of a run that a signal ended before its last step, with a checkpoint."""
EXIT_INTERRUPTED = 130
"""That of one that Ctrl-C ended so, as shells have it."""
RUN_FILE, DATA_FILE, TOKENIZER_FILE = "run.toml", "data.json", "tokenizer.json"


def run_directory(run: RunSpec) -> Path:
    """Where a run keeps what it makes."""
    return Path(run.output_dir).expanduser() / run.name


def preflight(run: RunSpec, world_size: int, resume: bool) -> None:
    """Raise UserError for what would stop this run later; its text is `prepare`'s to check. Changes nothing."""
    check_layout(run, world_size)
    check_torch_supports(run.layout)
    known = {"bytes": BYTES_VOCAB, "bpe": run.data.tokenizer_vocab}.get(run.data.tokenizer, 0)
    if run.model.vocab_size < known:
        raise UserError(
            "model.vocab_size",
            run.model.vocab_size,
            f"is less than the tokenizer's {known} tokens",
            f"set model.vocab_size = {known}",
        )
    if run.recovery.in_memory_checkpoint_every:
        _check_copies(run, world_size)
    if run.metrics.wandb is not None:
        check_wandb(run.metrics.wandb)
    if run.layout.offload_directory is not None:
        _check_offload(run, run.layout.offload_directory, world_size)
    _check_directory(run, resume)
    # Ranks of other nodes notice that one was lost when a collective's time is over.
    others = run.training.collective_timeout_seconds if resume and run.cluster.nodes > 1 else 0
    check_not_running(run_directory(run), SHUTDOWN_GRACE_SECONDS + others)


def _check_copies(run: RunSpec, world_size: int) -> None:
    def refuse(problem: str) -> None:
        raise UserError(
            "recovery.in_memory_checkpoint_every", run.recovery.in_memory_checkpoint_every, problem, "set it to 0"
        )

    if not hasattr(os, "memfd_create"):
        refuse("needs memory without a name (memfd_create), which this system has not")
    if run.layout.offload == "nvme":
        refuse('keeps copies in memory of what rests on disk there (layout.offload = "nvme")')
    each = max(state.parameters + state.optimizer for state in rank_model_states(run, world_size))
    copies = 2 if run.cluster.nodes == 1 else 4
    needed = copies * each * world_size / run.cluster.nodes
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        refuse(f"takes {needed / 1e9:.1f} GB of this machine's {memory / 1e9:.1f} for {copies} copies of each state")


def _check_offload(run: RunSpec, directory: str, world_size: int) -> None:
    place = Path(directory).expanduser()
    fix = "name a directory on a local disk"
    if not place.is_dir():
        raise UserError("layout.offload_directory", directory, "is no directory on this machine", fix)
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError("layout.offload_directory", directory, "cannot be written to", fix)
    ranks_here = world_size / run.cluster.nodes
    free, needed = shutil.disk_usage(place).free, ranks_here * disk_offload_bytes(run, world_size)
    if needed > free:
        raise UserError(
            "layout.offload_directory",
            directory,
            f"{needed / 1e9:.2f} GB of optimizer state rest there, and {free / 1e9:.2f} GB are free",
            fix,
        )


def _check_directory(run: RunSpec, resume: bool) -> None:
    directory = run_directory(run)
    existing = directory
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            "output_dir",
            str(existing),
            "is not a directory that can be written to",
            "set output_dir to another directory",
        )
    found = checkpoints(directory / "checkpoints")
    if found and resume:
        check_manifest(run, latest_manifest(found))
    elif resume:
        check_not_all_damaged(directory / "checkpoints")
    elif found or (directory / METRICS_FILE).exists():
        raise UserError(
            "name",
            run.name,
            f"{directory} holds a run already",
            "add --resume to continue it, or choose another with --set name=...",
        )
    needed, free = checkpoint_space_needed_bytes(run, len(found)), shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(
            "checkpoint.keep",
            run.checkpoint.keep,
            f"needs {needed / 1e9:.2f} GB for checkpoints, and {existing} has {free / 1e9:.2f} GB free",
            "free space, lower checkpoint.keep, or set output_dir to another disk",
        )


def create_run(run: RunSpec, world_size: int, resume: bool) -> Path:
    """Check a run, prepare its data, and write its directory; returns the directory.

    Raises UserError before anything is written if the run cannot work.
    """
    return write_run_directory(run, check_and_prepare(run, world_size, resume))


def check_and_prepare(
    run: RunSpec, world_size: int, resume: bool, progress: Callable[..., None] | None = None
) -> PreparedData:
    """Check a run, and prepare its data.

    Raises UserError if the run cannot work.
    """
    preflight(run, world_size, resume)
    prepared = prepare(run.data, progress)  # in the user's own words, which its errors quote
    run = with_absolute_paths(run)
    found = checkpoints(run_directory(run) / "checkpoints") if resume else []
    sequences = plan_batch(run, world_size).global_batch_size
    _check_tokens(run, prepared, sequences, latest_manifest(found) if found else None)
    if run.model.from_hf and not found:
        from phalanx.train.training_data import initial_weights  # torch, which by now is needed anyway

        initial_weights(run)
    return prepared


def lock_run_directory(run: RunSpec, resume: bool) -> IO[str] | None:
    """Hold a run's directory for its launcher, from before it writes there until it has ended, also where it becomes
    the rank itself (exec); None where the file system has no locks.

    Raises UserError if another has it, or has trained there since the run was checked.
    """
    directory = run_directory(run)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = acquire_run_lock(directory, name=LAUNCHER_LOCK_FILE)
    except OSError as error:
        raise _not_written(directory, error) from None
    _check_directory(run, resume)
    if lock is not None:
        os.set_inheritable(lock.fileno(), True)
    return lock


def write_run_directory(run: RunSpec, prepared: PreparedData) -> Path:
    """Write the directory of a run that was checked; returns it. Raises UserError if it cannot be written."""
    run = with_absolute_paths(run)
    directory = run_directory(run)
    paths = {name: os.path.abspath(path) if path else "" for name, path in asdict(prepared).items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / RUN_FILE).write_text(to_toml(run))
        (directory / DATA_FILE).write_text(json.dumps(paths, indent=1))
        shutil.copyfile(prepared.tokenizer, directory / TOKENIZER_FILE)
    except OSError as error:
        raise _not_written(directory, error) from None
    for left in (FAILURES, HANGS):  # by an earlier start
        shutil.rmtree(directory / left, ignore_errors=True)
    return directory


def _not_written(directory: Path, error: OSError) -> UserError:
    return UserError(
        "output_dir", str(directory), f"cannot be written: {error.strerror}", "set output_dir to another directory"
    )


def latest_manifest(found: list[Path]) -> dict[str, Any]:
    """The manifest of the newest of some checkpoints that has one: a damaged one may not.

    Raises UserError if none was written by phalanx.
    """
    for checkpoint in found:
        with suppress(UserError):
            return read_manifest(checkpoint)
    return read_manifest(found[0])


def _check_tokens(run: RunSpec, prepared: PreparedData, sequences: int, manifest: dict[str, Any] | None) -> None:
    """Raise UserError if the text is too little, the tokenizer has more tokens than the model, or a checkpoint to
    continue from was made with other text."""
    tokenizer = load_tokenizer(prepared.tokenizer)
    if tokenizer.vocab > run.model.vocab_size:
        raise UserError(
            "model.vocab_size",
            run.model.vocab_size,
            f"is less than the tokenizer's {tokenizer.vocab} tokens",
            f"set model.vocab_size = {tokenizer.vocab}",
        )
    held_out = IndexedDataset(prepared.held_out)
    if held_out.size < 2:
        raise UserError(
            "data.held_out",
            run.data.held_out or run.data.train,
            f"leaves {held_out.size} tokens to evaluate on",
            "give more text, or raise data.held_out_fraction",
        )
    if prepared.train:
        loader = TokenLoader(IndexedDataset(prepared.train), run.training.seq_len, sequences, run.training.seed)
        if manifest is not None:
            loader.resume(manifest["loader"], resized=run.training.batch_scaling != "keep")


def read_run_directory(directory: Path) -> tuple[RunSpec, PreparedData]:
    """The run and the data that `create_run` wrote down.

    Raises UserError if it is no run directory.
    """
    if not (directory / DATA_FILE).is_file():
        raise UserError(
            "run directory",
            str(directory),
            f"has no {DATA_FILE}",
            "give a run file, or a directory that phalanx train made",
        )
    return load_run(directory / RUN_FILE, environment={}), PreparedData(
        **json.loads((directory / DATA_FILE).read_text())
    )


def with_absolute_paths(run: RunSpec) -> RunSpec:
    """The run with paths that mean the same from any working directory."""

    def path(source: str) -> str:
        named = source == "stdlib" or source.startswith("hf:")
        return source if named else os.path.abspath(os.path.expanduser(source))

    data = run.data
    tokenizer = data.tokenizer if data.tokenizer in ("bpe", "bytes") else path(data.tokenizer)
    lists = {"train": [path(s) for s in data.train], "held_out": [path(s) for s in data.held_out]}
    model = run.model.replace(from_hf=path(run.model.from_hf)) if run.model.from_hf else run.model
    named = ("offload_directory", "schedule_file")
    files = {field: path(value) for field in named if (value := getattr(run.layout, field)) is not None}
    described = {
        "data": data.replace(tokenizer=tokenizer, cache=path(data.cache), **lists),
        "model": model,
        "layout": run.layout.replace(**files),
    }
    return run.model_copy(update={"output_dir": path(run.output_dir), **described})


def to_toml(run: RunSpec) -> str:
    """A run as a TOML file that loads into the same run. Of a machine with a name only what differs from its preset is
    written, so that another may take its place."""
    table = run.model_dump(mode="json", exclude_none=True)
    return tomli_w.dumps({**table, "cluster": cluster_overrides(run.cluster)})
