"""What makes a checkpoint whole: its manifest and checksums. No torch: the command line looks here before it spawns.

    checkpoints/latest                   the name of the newest complete checkpoint
    checkpoints/step-00000100.before/    one that was written anew (`phalanx experts`), as it was
    checkpoints/step-00000100.damaged/   one that was set aside
    checkpoints/step-00000100/
        shard-*.safetensors              parameters and optimizer state, as DCP wrote them
        rank-*.json                      random state and checksums of each rank's files
        manifest.json                    step, tokens, loader state, model
        SHA256SUMS                       of every file above; `sha256sum -c SHA256SUMS` checks it

A checkpoint is written as step-*.tmp and renamed when all of it is on disk."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from phalanx.spec.errors import UserError
from phalanx.spec.run import RunSpec

CHECKPOINTS_DIR = "checkpoints"
FORMAT = "phalanx-checkpoint"
CHECKSUMS_FILE = "SHA256SUMS"
LATEST_FILE = "latest"
PREVIOUS_SUFFIX = ".before"
DAMAGED_SUFFIX = ".damaged"
SHAPE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "ffn_hidden_size",
    "norm",
    "activation",
    "position_embedding",
    "bias",
    "qk_norm",
    "tie_embeddings",
)
EXPERT_SHAPE_FIELDS = (
    "num_experts",
    "top_k",
    "expert_ffn_size",
    "num_shared_experts",
    "num_leading_dense_layers",
    "router_score",
    "bias_update_rate",
)
_CHECKPOINT_NAME = re.compile(r"step-(\d{8})")
_CHECKSUM_LINE = re.compile(r"([0-9a-f]{64})  ([\w.-]+)")


def step_name(step: int) -> str:
    """The directory name of a checkpoint."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written, by its name."""
    return int(checkpoint.name.rpartition("-")[2])


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in a directory, newest first; unfinished ones (.tmp) do not count."""
    paths = [path for path in directory.glob("step-*") if _CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(paths, reverse=True)


def sha256(path: Path) -> str:
    """Checksum of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None if every byte of it is as it was written."""
    try:
        return find_damaged_files(checkpoint, read_checksums(checkpoint))
    except ValueError as problem:
        return str(problem)


def read_checksums(checkpoint: Path) -> dict[str, str]:
    """The checksums of a checkpoint's files, by their names.

    Raises ValueError if they cannot be read, or the files are others.
    """
    try:
        lines = (checkpoint / CHECKSUMS_FILE).read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{CHECKSUMS_FILE} cannot be read ({error})") from None
    matches = [_CHECKSUM_LINE.fullmatch(line) for line in lines[:-1]]
    if lines[-1] or not matches or not all(matches):
        raise ValueError(f"{CHECKSUMS_FILE} is not in its format")
    checksums = {match[2]: match[1] for match in matches if match}
    present = {path.name for path in checkpoint.iterdir()} - {CHECKSUMS_FILE}
    if present != set(checksums):
        raise ValueError(f"files differ from {CHECKSUMS_FILE}: {', '.join(sorted(present ^ set(checksums)))}")
    return checksums


def find_damaged_files(checkpoint: Path, checksums: Mapping[str, str]) -> str | None:
    """What is wrong with those files of a checkpoint whose checksums these are."""
    try:
        mismatched_files = [name for name, digest in checksums.items() if sha256(checkpoint / name) != digest]
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    return f"checksum of {', '.join(mismatched_files)} is wrong" if mismatched_files else None


def latest_valid(directory: Path) -> tuple[Path | None, dict[str, str]]:
    """The newest undamaged checkpoint in a directory, and what is wrong with those that are newer."""
    damaged: dict[str, str] = {}
    recover_interrupted_rewrites(directory)
    for checkpoint in checkpoints(directory):
        problem = find_damage(checkpoint)
        if problem is None:
            return checkpoint, damaged
        damaged[checkpoint.name] = problem
    return None, damaged


def recover_interrupted_rewrites(directory: Path) -> None:
    """Of checkpoints that were to be written anew by somebody who was stopped at it, take the old ones."""
    for backup in directory.glob(f"step-*{PREVIOUS_SUFFIX}"):
        if not backup.with_suffix("").exists():
            backup.rename(backup.with_suffix(""))


def require_valid_checkpoint(run_directory: Path) -> Path:
    """The newest undamaged checkpoint of a run; says which newer ones were passed over, and why.

    Raises UserError if there is none.
    """
    checkpoint, damaged = latest_valid(run_directory / CHECKPOINTS_DIR)
    if checkpoint is None:
        problem = f"has no intact checkpoint: {damaged}" if damaged else "has no checkpoint yet"
        raise UserError("run directory", str(run_directory), problem, fix="let the run reach its first checkpoint")
    for name, problem in damaged.items():
        print(f"phalanx: checkpoint {name} is damaged and was passed over: {problem}", file=sys.stderr)
    return checkpoint


def quarantine(directory: Path, damaged: Iterable[str], intact: Path | None) -> None:
    """Take damaged checkpoints out of the way (step-N.damaged), and let `latest` name the one that is used."""
    for name in damaged:
        quarantine_path = directory / f"{name}{DAMAGED_SUFFIX}"
        if quarantine_path.exists():
            shutil.rmtree(quarantine_path)
        (directory / name).rename(quarantine_path)
    if intact is not None:
        _update_latest(intact)


def check_not_all_damaged(directory: Path) -> None:
    """Raise UserError where checkpoints were set aside, for a run that finds no other: a disk that is ill for a while
    must not make it begin anew."""
    quarantined = sorted(path.name for path in directory.glob(f"*{DAMAGED_SUFFIX}"))
    if quarantined:
        raise UserError(
            "run directory",
            str(directory.parent),
            f"has no intact checkpoint: {', '.join(quarantined)}",
            fix="look after the disk, and take the ending off those that are well; "
            "to begin anew, remove them or choose another name",
        )


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises UserError if it is not one of ours."""
    path = checkpoint / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(
            "checkpoint",
            str(checkpoint),
            "was not written by phalanx (no manifest.json of ours)",
            fix="give a run directory of phalanx; to start from Hugging Face weights set model.from_hf",
        )
    return manifest


def write_synced(path: Path, text: str) -> None:
    """Write a file and make sure that it is on disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Make sure that a file's content, or a directory's entries, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(unfinished: Path, checksums: dict[str, str]) -> Path:
    """Turn a complete step-*.tmp into a checkpoint: checksums, rename, `latest`. One that is in its place is kept
    beside it, as step-*.before."""
    write_synced(
        unfinished / CHECKSUMS_FILE, "".join(f"{digest}  {name}\n" for name, digest in sorted(checksums.items()))
    )
    sync(unfinished)
    final = unfinished.with_suffix("")
    backup = unfinished.with_suffix(PREVIOUS_SUFFIX)
    if final.exists():
        shutil.rmtree(backup, ignore_errors=True)
        final.rename(backup)
    unfinished.rename(final)
    sync(final.parent)
    _update_latest(final)
    return final


def _update_latest(checkpoint: Path) -> None:
    """Let `latest` name a checkpoint."""
    latest = checkpoint.parent / f"{LATEST_FILE}.tmp"
    write_synced(latest, checkpoint.name + "\n")
    latest.rename(checkpoint.parent / LATEST_FILE)
    sync(checkpoint.parent)


def check_manifest(run: RunSpec, manifest: dict[str, Any]) -> None:
    """Raise UserError if a checkpoint is of another model or optimizer than `run` describes, or beyond its end."""
    if run.training.steps < manifest["step"]:
        raise UserError(
            "training.steps",
            run.training.steps,
            f"is less than the {manifest['step']} steps that the run has done",
            fix="raise it, or start a new run",
        )
    saved_model = manifest["model"]
    current_model = run.model.model_dump(mode="json")
    saved_moe = saved_model["moe"] or {}
    current_moe = current_model["moe"] or {}
    pairs = [(f"model.{name}", saved_model[name], current_model[name]) for name in SHAPE_FIELDS]
    pairs += [(f"model.moe.{name}", saved_moe.get(name), current_moe.get(name)) for name in EXPERT_SHAPE_FIELDS]
    pairs += [("optimizer.name", manifest["optimizer"], run.optimizer.name)]
    for field, saved, configured in pairs:
        if saved != configured:
            raise UserError(
                field, configured, f"is not the checkpoint's ({saved!r})", fix="resume with that, or start a new run"
            )
