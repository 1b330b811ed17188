"""Write and read a run directory.

RUN_DIR/phalanx.json      marker: Phalanx may write to this directory
RUN_DIR/run.toml          the complete run specification, resolved
RUN_DIR/plan.json         the planner's layouts for `layout = "auto"`
RUN_DIR/data.json         the paths of the token files
RUN_DIR/tokenizer.json
RUN_DIR/bad_records.jsonl the broken records of the data that were skipped, if any
RUN_DIR/tokenizer_config.json   its end token, if it is not one that `phalanx.data.tokenizer` knows
RUN_DIR/from_hf/          the files of `model.from_hf` that `phalanx export` copies: all but the weights
RUN_DIR/teacher/          the run file or config.json of `distillation.teacher`

Other modules of this package define the other files: `metrics` (metrics.jsonl, tensorboard/, wandb.id), `checkpoints`,
`step_records` (trace/), `measured`, `events`, `hang_dumps` (hangs/, failures/), `lock` and `swarm_records`. Only
layout.json, the layout of the last start, belongs to `spec/files/load.py`.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from phalanx import __version__
from phalanx.data.bad_records import BAD_RECORDS_FILE, read_bad_records, write_bad_records
from phalanx.data.prepare import PreparedData
from phalanx.runs.checkpoints import CHECKPOINTS_DIR, check_manifest, checkpoints, find_damage, read_manifest, step_of
from phalanx.runs.decode import Decode, decode_object, decoder, read_json
from phalanx.runs.hang_dumps import remove_dumps_from_rank
from phalanx.spec.base import did_you_mean
from phalanx.spec.errors import UserError
from phalanx.spec.files.hub import FILES_NEXT_TO_WEIGHTS, TOKENIZER_CONFIG_FILE
from phalanx.spec.files.hub import TOKENIZER_FILE as TOKENIZER_FILE
from phalanx.spec.files.load import hf_config_file, load_run
from phalanx.spec.files.replace import replace_file
from phalanx.spec.files.tables import MARKER_FILE
from phalanx.spec.files.tables import RUN_FILE as RUN_FILE
from phalanx.spec.files.teacher import keep_teacher
from phalanx.spec.files.write import to_toml, with_absolute_paths
from phalanx.spec.run import RunSpec

DATA_FILE = "data.json"
PLAN_FILE = "plan.json"
FROM_HF_DIR = "from_hf"
MIXTURE_PATHS = ("sources", "held_out_sources")
"""Fields of data.json that only a mixture has."""

_decode_paths: Decode[dict[str, str | list[str]]] = decoder(dict[str, str | list[str]])


def _decode_prepared_data(content: bytes) -> PreparedData:
    """Decode data.json."""
    paths = _decode_paths(content)
    several: dict[str, tuple[str, ...]] = {}
    for name in MIXTURE_PATHS:
        value = paths.pop(name, [])
        several[name] = tuple(value) if isinstance(value, list) else ("\0",)
    single = {name: value for name, value in paths.items() if isinstance(value, str)}
    names = {field.name for field in fields(PreparedData)} - {*MIXTURE_PATHS}
    all_paths = [*single.values(), *(path for value in several.values() for path in value)]
    if paths.keys() != names or len(single) < len(names) or any("\0" in path for path in all_paths):
        raise ValueError("the names or the paths of files are damaged")
    return PreparedData(single["train"], single["held_out"], single["tokenizer"], **several)


def _encode_prepared_data(prepared: PreparedData) -> str:
    """Encode data.json, which has lists of paths only for a mixture."""
    paths = asdict(prepared)
    for name in MIXTURE_PATHS:
        paths[name] = [os.path.abspath(path) for path in paths[name]]
        if not paths[name]:
            del paths[name]
    for name in paths.keys() - {*MIXTURE_PATHS}:
        paths[name] = os.path.abspath(paths[name]) if paths[name] else ""
    return json.dumps(paths, indent=1)


def run_directory(run: RunSpec) -> Path:
    """Return the output directory of a run."""
    return Path(run.output_dir).expanduser() / run.name


def require_run(directory: Path) -> None:
    """Raise UserError unless a directory has a run file. The fix names the run that was perhaps meant."""
    if (directory / RUN_FILE).is_file():
        return
    problem = f"has no {RUN_FILE}"
    fix = "use a run directory of phalanx train: runs/NAME"
    parent = directory
    if not directory.is_dir():
        problem = "is a file" if directory.exists() else "does not exist"
        parent = directory.parent
    runs = sorted(file.parent.name for file in parent.glob(f"*/{RUN_FILE}"))
    if runs:
        command = f"phalanx runs {shlex.quote(str(parent))}"
        fix = f"name a run in {parent}, such as {parent / runs[0]}; `{command}` lists them"
        if parent != directory:
            fix = did_you_mean(directory.name, runs, fix)
    raise UserError("run directory", str(directory), problem, fix)


def is_run_directory(directory: Path) -> bool:
    """Return whether Phalanx created a directory and may write to it.

    Directories from before the marker file existed are recognized by the fields of their data.json.
    """
    with suppress(OSError, ValueError):
        if read_json(directory / MARKER_FILE, decode_object).get("made_by") == "phalanx":
            return True
    with suppress(OSError, ValueError):
        read_json(directory / DATA_FILE, _decode_prepared_data)
        return (directory / RUN_FILE).is_file()
    return False


def check_claimable(directory: Path) -> None:
    """Raise UserError if a directory contains files that Phalanx did not write."""
    try:
        # Another launcher may be writing the marker. Its other files come later, so the names are read first.
        names = [path.name for path in sorted(directory.iterdir()) if not path.name.startswith(f"{MARKER_FILE}.")]
    except FileNotFoundError:
        return
    except OSError as error:
        raise directory_not_writable(directory, error) from None
    if names and not is_run_directory(directory):
        problem = f"leads to {directory}, which contains files of no run ({names[0]}) that could be overwritten"
        raise UserError(
            "name", directory.name, problem, fix="choose another name with --set name=..., or set output_dir"
        )


def claim_run_directory(directory: Path) -> None:
    """Mark a new or empty directory as Phalanx's, before any other file is written to it.

    Raises UserError if the directory contains files that Phalanx did not write, or is not writable.
    """
    check_claimable(directory)
    if (directory / MARKER_FILE).is_file():
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory / MARKER_FILE, json.dumps({"made_by": "phalanx", "version": __version__}) + "\n")
    except OSError as error:
        raise directory_not_writable(directory, error) from None


def write_run_directory(run: RunSpec, prepared: PreparedData) -> Path:
    """Write the directory of a validated run, and return its path.

    An existing run file with an equal specification is not rewritten, so that the user's comments in it remain.
    Raises UserError if the directory is not writable.
    """
    run = with_absolute_paths(run)
    directory = run_directory(run)
    claim_run_directory(directory)
    saved_run = None
    with suppress(UserError):
        saved_run = load_run(directory / RUN_FILE, environment={}, trust=True)
    try:
        if saved_run != run:
            rewrite_run_file(directory, run)
        replace_file(directory / DATA_FILE, _encode_prepared_data(prepared))
        _list_bad_records(run, prepared, directory)
        replace_file(directory / TOKENIZER_FILE, Path(prepared.tokenizer).read_text(encoding="utf-8"))
        (directory / TOKENIZER_CONFIG_FILE).unlink(missing_ok=True)
        if (config := Path(prepared.tokenizer).with_name(TOKENIZER_CONFIG_FILE)).is_file():
            replace_file(directory / TOKENIZER_CONFIG_FILE, config.read_text(encoding="utf-8"))
        keep_hf_files(run, directory)
        keep_teacher(run, directory)
        remove_dumps_from_rank(directory, 0)
    except OSError as error:
        raise directory_not_writable(directory, error) from None
    return directory


def _list_bad_records(run: RunSpec, prepared: PreparedData, directory: Path) -> None:
    """List the broken records of the data, and of a resumed stream those that it has passed."""
    file = directory / BAD_RECORDS_FILE
    is_resumed_stream = run.data.streaming and checkpoints(directory / CHECKPOINTS_DIR)
    passed = read_bad_records(file) if is_resumed_stream else []
    write_bad_records(file, list(dict.fromkeys([*prepared.bad_records, *passed])))


def keep_hf_files(run: RunSpec, directory: Path) -> None:
    """Copy the files of `model.from_hf` that an export contains to the run directory.

    The files of a run with a checkpoint remain unchanged.
    """
    if checkpoints(directory / CHECKPOINTS_DIR):
        return
    target_directory = directory / FROM_HF_DIR
    shutil.rmtree(target_directory, ignore_errors=True)
    if run.model.from_hf is None:
        return
    config = hf_config_file(run.model.from_hf)
    if not config.is_file():
        fix = "use a directory that save_pretrained has written"
        raise UserError("model.from_hf", run.model.from_hf, f"has no {config.name}", fix=fix)
    for file in (
        file for pattern in FILES_NEXT_TO_WEIGHTS for file in sorted(config.parent.glob(pattern)) if file.is_file()
    ):
        target = target_directory / file.relative_to(config.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    target_directory.mkdir(exist_ok=True)
    shutil.copyfile(config, target_directory / "config.json")


def directory_not_writable(directory: Path, error: OSError) -> UserError:
    """Return the error for an output directory that cannot be written."""
    fix = "set output_dir to another directory"
    return UserError("output_dir", str(directory), f"is not writable: {error.strerror}", fix=fix)


def latest_manifest(checkpoints: list[Path]) -> dict[str, Any]:
    """Return the manifest of the newest of these checkpoints that has a readable one.

    Raises UserError if no checkpoint has a manifest of Phalanx.
    """
    for checkpoint in checkpoints:
        with suppress(UserError):
            return read_manifest(checkpoint)
    return read_manifest(checkpoints[0])


def read_run_directory(directory: Path, trust: bool = False) -> tuple[RunSpec, PreparedData]:
    """Return the run and the prepared data of a run directory.

    With `trust`, the components that it names may be imported. Raises UserError if the directory is not a run
    directory.
    """
    if not is_run_directory(directory) or not (directory / DATA_FILE).is_file():
        fix = "use a run file, or a run directory of phalanx train"
        raise UserError("run directory", str(directory), f"has no {DATA_FILE} written by Phalanx", fix=fix)
    run = load_run(directory / RUN_FILE, environment={}, trust=trust)
    try:
        prepared = read_json(directory / DATA_FILE, _decode_prepared_data)
    except (OSError, ValueError):
        fix = f"restore {DATA_FILE} from a copy, or start a new run"
        raise UserError("run directory", str(directory), f"has a damaged {DATA_FILE}", fix=fix) from None
    return run, prepared


def rewrite_run_file(directory: Path, run: RunSpec) -> None:
    """Replace the run file of a run directory after an open choice of it was resolved."""
    replace_file(directory / RUN_FILE, to_toml(run))


def is_finished(directory: Path) -> bool:
    """Return whether a run has a checkpoint of its last step."""
    saved = checkpoints(directory / CHECKPOINTS_DIR)
    return bool(saved) and step_of(saved[0]) == read_run_directory(directory)[0].training.steps


def completed_steps(run: RunSpec, step: int | None = None) -> int | None:
    """Return the number of steps of a run if none is left after its last checkpoint, or that of `step`; else None.

    Raises UserError if the last checkpoint has another model or optimizer."""
    directory = run_directory(run)
    saved = checkpoints(directory / CHECKPOINTS_DIR, step)
    steps = run.training.steps
    if not run.training.has_decided_steps:
        with suppress(UserError):
            steps = load_run(directory / RUN_FILE, environment={}).training.steps
    # A damaged checkpoint is left to the ranks, which continue from the one before.
    if not saved or step_of(saved[0]) != steps or find_damage(saved[0]) is not None:
        return None
    check_manifest(run, read_manifest(saved[0]))
    return steps
