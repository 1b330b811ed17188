"""What makes a checkpoint whole: its manifest and checksums. No torch: the command line looks here before it spawns.

    checkpoints/latest                   the name of the newest complete checkpoint
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
from pathlib import Path
from typing import Any

from phalanx.spec.errors import UserError

FORMAT = "phalanx-checkpoint"
SUMS = "SHA256SUMS"
LATEST = "latest"
_NAME = re.compile(r"step-(\d{8})")
_LINE = re.compile(r"([0-9a-f]{64})  ([\w.-]+)")


def step_name(step: int) -> str:
    """The directory name of a checkpoint."""
    return f"step-{step:08d}"


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in a directory, newest first; unfinished ones (.tmp) do not count."""
    found = [path for path in directory.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, reverse=True)


def sha256(path: Path) -> str:
    """Checksum of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None if every byte of it is as it was written."""
    try:
        lines = (checkpoint / SUMS).read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        return f"{SUMS} cannot be read ({error})"
    matches = [_LINE.fullmatch(line) for line in lines[:-1]]
    if lines[-1] or not matches or not all(matches):
        return f"{SUMS} is not in its format"
    sums = {match[2]: match[1] for match in matches if match}
    present = {path.name for path in checkpoint.iterdir()} - {SUMS}
    if present != set(sums):
        return f"files differ from {SUMS}: {', '.join(sorted(present ^ set(sums)))}"
    wrong = [name for name, digest in sums.items() if sha256(checkpoint / name) != digest]
    return f"checksum of {', '.join(wrong)} is wrong" if wrong else None


def newest_intact(directory: Path) -> tuple[Path | None, dict[str, str]]:
    """The newest undamaged checkpoint in a directory, and what is wrong with those that are newer."""
    damaged: dict[str, str] = {}
    for checkpoint in checkpoints(directory):
        problem = damage(checkpoint)
        if problem is None:
            return checkpoint, damaged
        damaged[checkpoint.name] = problem
    return None, damaged


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises UserError if it is not one of ours."""
    path = checkpoint / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(
            "checkpoint", str(checkpoint), "was not written by phalanx (no manifest.json of ours)",
            "give a run directory of phalanx; to start from Hugging Face weights set model.from_hf",
        )  # fmt: skip
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


def publish(unfinished: Path, sums: dict[str, str]) -> Path:
    """Turn a complete step-*.tmp into a checkpoint: checksums, rename, `latest`."""
    write_synced(unfinished / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))
    sync(unfinished)
    final = unfinished.with_suffix("")
    unfinished.rename(final)
    sync(final.parent)
    latest = final.parent / f"{LATEST}.tmp"
    write_synced(latest, final.name + "\n")
    latest.rename(final.parent / LATEST)
    sync(final.parent)
    return final
