"""reference.npz of a run directory: the log-probabilities of answers by the initial weights of a run on preferences."""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.spec.errors import UserError

REFERENCE_FILE = "reference.npz"
TRAIN = "train"
HELD_OUT = "held_out"


@dataclass(frozen=True)
class ReferenceLogProbs:
    """Log-probabilities of the answers of two files of documents, fp64 [documents]; 0 for documents left out."""

    train: np.ndarray
    held_out: np.ndarray


@dataclass(frozen=True)
class ReferenceIdentity:
    """The data and the weights of log-probabilities."""

    train: str
    held_out: str
    weights: str


def write_reference(directory: Path, identity: ReferenceIdentity, values: ReferenceLogProbs) -> None:
    """Write the file; it is complete or absent after a failure."""
    file = directory / REFERENCE_FILE
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as opened:
            np.savez(
                opened, train=values.train, held_out=values.held_out, identity=np.array(json.dumps(vars(identity)))
            )
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def read_reference(directory: Path) -> tuple[ReferenceIdentity, ReferenceLogProbs] | None:
    """Return the content of the file; None if it is missing or damaged."""
    try:
        with np.load(directory / REFERENCE_FILE, allow_pickle=False) as arrays:
            identity = ReferenceIdentity(**json.loads(str(arrays["identity"])))
            return identity, ReferenceLogProbs(arrays[TRAIN], arrays[HELD_OUT])
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None


def require_reference(directory: Path) -> ReferenceIdentity:
    """Return what the file of a run that resumes was computed from. Raises UserError if it is missing or damaged."""
    found = read_reference(directory)
    if found is None:
        raise lost_reference(directory, "is missing or damaged")
    return found[0]


def lost_reference(directory: Path, problem: str) -> UserError:
    """Return the error for a run that resumes without the log-probabilities of its pairs."""
    fix = "restore the file, or start a new run: the reference is the run with its initial weights"
    return UserError("preference", str(directory / REFERENCE_FILE), problem, fix)
