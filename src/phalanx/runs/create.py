"""Write and read a run directory.

RUN_DIR/phalanx.json      says that this directory is Phalanx's to write in
RUN_DIR/run.toml          the whole run, resolved
RUN_DIR/plan.json         what the planner offered for `layout = "auto"`
RUN_DIR/data.json         the paths of the tokens
RUN_DIR/tokenizer.json
RUN_DIR/from_hf/          the files of `model.from_hf` that `phalanx export` hands on: all but the weights

Other modules of this package name the other files: `metrics` (metrics.jsonl, tensorboard/, wandb.id), `checkpoints`,
`step_records` (trace/), `measured`, `events`, `hang_dumps` (hangs/, failures/), `lock` and `swarm_records`. Only
layout.json, the layout of the last start, belongs to `spec/files/load.py`."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from phalanx import __version__
from phalanx.data.prepare import PreparedData
from phalanx.runs.checkpoints import CHECKPOINTS_DIR, checkpoints, read_manifest, step_of
from phalanx.runs.hang_dumps import remove_dumps_from_rank
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import hf_config_file, load_run
from phalanx.spec.files.write import to_toml, with_absolute_paths
from phalanx.spec.run import RunSpec

RUN_FILE = "run.toml"
DATA_FILE = "data.json"
TOKENIZER_FILE = "tokenizer.json"
PLAN_FILE = "plan.json"
MARKER_FILE = "phalanx.json"
FROM_HF_DIR = "from_hf"
FROM_HF_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.*",
    "additional_chat_templates/*",
    "LICENSE*",
    "NOTICE*",
)
"""Files of a Hugging Face directory that hold for the trained model too, by glob; not its model card."""


def run_directory(run: RunSpec) -> Path:
    """Where a run keeps what it makes."""
    return Path(run.output_dir).expanduser() / run.name


def is_run_directory(directory: Path) -> bool:
    """Return whether Phalanx made this directory, and may write in it.

    Directories made before there was a marker are known by the fields of their data.json.
    """
    with suppress(OSError, ValueError, AttributeError):
        if json.loads((directory / MARKER_FILE).read_text()).get("made_by") == "phalanx":
            return True
    with suppress(OSError, ValueError, AttributeError):
        data_fields = json.loads((directory / DATA_FILE).read_text()).keys()
        return (directory / RUN_FILE).is_file() and data_fields == {field.name for field in fields(PreparedData)}
    return False


def check_claimable(directory: Path) -> None:
    """Raise UserError if a directory holds files that Phalanx did not write."""
    if is_run_directory(directory) or not directory.exists():
        return
    try:
        foreign_name = next((path.name for path in sorted(directory.iterdir())), None)
    except OSError as error:
        raise directory_not_writable(directory, error) from None
    if foreign_name is not None:
        problem = (
            f"{directory} is not a run directory, and holds files already ({foreign_name}): they could be overwritten"
        )
        raise UserError("name", directory.name, problem, fix="choose another with --set name=..., or set output_dir")


def claim_run_directory(directory: Path) -> None:
    """Mark a new or empty directory as Phalanx's, before anything else is written there.

    Raises UserError if it holds files that Phalanx did not write, or cannot be written.
    """
    check_claimable(directory)
    if (directory / MARKER_FILE).is_file():
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MARKER_FILE).write_text(json.dumps({"made_by": "phalanx", "version": __version__}) + "\n")
    except OSError as error:
        raise directory_not_writable(directory, error) from None


def write_run_directory(run: RunSpec, prepared: PreparedData) -> Path:
    """Write the directory of a run that was checked; returns it. A run file that says the same already is left as it
    is, with what its user noted in it.

    Raises UserError if it cannot be written.
    """
    run = with_absolute_paths(run)
    directory = run_directory(run)
    claim_run_directory(directory)
    paths = {name: os.path.abspath(path) if path else "" for name, path in asdict(prepared).items()}
    try:
        if not _describes(directory / RUN_FILE, run):
            (directory / RUN_FILE).write_text(to_toml(run))
        (directory / DATA_FILE).write_text(json.dumps(paths, indent=1))
        shutil.copyfile(prepared.tokenizer, directory / TOKENIZER_FILE)
        keep_hf_files(run, directory)
        remove_dumps_from_rank(directory, 0)
    except OSError as error:
        raise directory_not_writable(directory, error) from None
    return directory


def _describes(file: Path, run: RunSpec) -> bool:
    with suppress(UserError):
        return load_run(file, environment={}) == run
    return False


def keep_hf_files(run: RunSpec, directory: Path) -> None:
    """Copy the files of `model.from_hf` that an export hands on into a run directory, before its first checkpoint."""
    if checkpoints(directory / CHECKPOINTS_DIR):
        return
    kept = directory / FROM_HF_DIR
    shutil.rmtree(kept, ignore_errors=True)
    if run.model.from_hf is None:
        return
    config = hf_config_file(run.model.from_hf)
    if not config.is_file():
        fix = "give a directory that save_pretrained wrote"
        raise UserError("model.from_hf", run.model.from_hf, f"has no {config.name}", fix=fix)
    files = [file for pattern in FROM_HF_FILES for file in sorted(config.parent.glob(pattern)) if file.is_file()]
    for file in files:
        target = kept / file.relative_to(config.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    kept.mkdir(exist_ok=True)
    shutil.copyfile(config, kept / "config.json")


def directory_not_writable(directory: Path, error: OSError) -> UserError:
    return UserError(
        "output_dir", str(directory), f"cannot be written: {error.strerror}", fix="set output_dir to another directory"
    )


def latest_manifest(checkpoints: list[Path]) -> dict[str, Any]:
    """The manifest of the newest of some checkpoints that has one: a damaged one may not.

    Raises UserError if none was written by phalanx.
    """
    for checkpoint in checkpoints:
        with suppress(UserError):
            return read_manifest(checkpoint)
    return read_manifest(checkpoints[0])


def read_run_directory(directory: Path) -> tuple[RunSpec, PreparedData]:
    """The run and the data that `create_run` wrote down.

    Raises UserError if it is no run directory.
    """
    if not is_run_directory(directory) or not (directory / DATA_FILE).is_file():
        fix = "give a run file, or a directory that phalanx train made"
        raise UserError("run directory", str(directory), f"has no {DATA_FILE} of phalanx", fix=fix)
    return load_run(directory / RUN_FILE, environment={}), PreparedData(
        **json.loads((directory / DATA_FILE).read_text())
    )


def rewrite_run_file(directory: Path, run: RunSpec) -> None:
    """Replace the run file of a run directory after a choice was made that the file left open."""
    temp_file = directory / f"{RUN_FILE}.partial"
    temp_file.write_text(to_toml(run))
    temp_file.replace(directory / RUN_FILE)


def is_finished(directory: Path) -> bool:
    """Return whether a run's last step is saved."""
    saved = checkpoints(directory / CHECKPOINTS_DIR)
    return bool(saved) and step_of(saved[0]) == read_run_directory(directory)[0].training.steps
