"""The teacher of a run with distillation, as a run of its own: its model, frozen, in the layout of the run."""

from __future__ import annotations

import shutil
from functools import lru_cache
from pathlib import Path

from phalanx.spec.errors import UserError
from phalanx.spec.files.hub import CONFIG_FILE
from phalanx.spec.files.load import load_model_spec, load_run
from phalanx.spec.files.tables import RUN_FILE
from phalanx.spec.layers import check_sequence
from phalanx.spec.layout import FSDP_STRATEGIES
from phalanx.spec.model import ModelSpec
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.spec.tuning import TuningSpec

FIELD = "distillation.teacher"
TEACHER_DIR = "teacher"
"""Folder of a run directory with the description of the teacher's model."""


def teacher_run(run: RunSpec) -> RunSpec | None:
    """Return the teacher of a run, whose model is frozen; None without distillation.

    It has the layout of the run, because it computes the same micro-batches on the same ranks: sharded if FSDP shards
    the run's model, otherwise whole on each replica. Its experts are not divided among ranks.

    Raises UserError if there is no such model, or it does not suit the run."""
    if run.distillation is None:
        return None
    directory = Path(run.distillation.teacher).expanduser()
    model = _read_model(directory, _changed_at(directory))
    if model.vocab_size != run.model.vocab_size:
        problem = f"has a vocabulary of {model.vocab_size:,}, but model.vocab_size is {run.model.vocab_size:,}"
        fix = "use a teacher with the tokenizer of the model"
        if model.vocab_size > run.model.vocab_size:
            fix = f"set model.vocab_size = {model.vocab_size}, or {fix}"
        raise UserError(FIELD, str(directory), problem, fix)
    longest = max([run.training.seq_len, *(phase.seq_len or 0 for phase in run.phase)])
    try:
        check_sequence(model, "training.seq_len", longest)
    except UserError as error:
        problem = f"cannot compute {longest:,} tokens: training.seq_len {error.problem}"
        raise UserError(FIELD, str(directory), problem, error.fix) from None
    layout = run.layout.model_copy(
        update={
            "data_parallel": run.layout.data_parallel if run.layout.data_parallel in FSDP_STRATEGIES else "zero1",
            "ep": 1,
            "activation_checkpointing": "none",
            "auto_checkpointing": False,
            "recomputed_blocks": None,
            "offload": "none",
            "gradient_compression": "none",
            # Only the matrix of its head stays gathered, because the loss needs it.
            "reshard_after_forward": True,
            "fsdp_unit": "block" if run.layout.fsdp_unit == "model" else run.layout.fsdp_unit,
        }
    )
    frozen = model.model_copy(update={"tuning": TuningSpec(freeze=("*",))})
    return run.model_copy(update={"model": frozen, "layout": layout, "distillation": None, "adapter": None})


def resolved_teacher(resolved: ResolvedRun) -> ResolvedRun | None:
    """Return the teacher of a run on the same ranks; None without distillation."""
    teacher = teacher_run(resolved.run)
    return None if teacher is None else ResolvedRun(teacher, resolved.world_size)


def keep_teacher(run: RunSpec, directory: Path) -> None:
    """Copy the description of a run's teacher to the run directory, so that predictions do not need the teacher."""
    if run.distillation is None:
        return
    teacher = Path(run.distillation.teacher).expanduser()
    name = RUN_FILE if is_run_directory(teacher) else CONFIG_FILE
    folder = directory / TEACHER_DIR
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copyfile(teacher / name, folder / name)


def with_kept_teacher(run: RunSpec, directory: Path) -> RunSpec:
    """Return the run of a directory with the teacher that `keep_teacher` has described there."""
    folder = directory / TEACHER_DIR
    if run.distillation is None or not folder.is_dir():
        return run
    return run.replace(distillation=run.distillation.replace(teacher=str(folder)))


def is_run_directory(directory: Path) -> bool:
    """Return whether a teacher is the model of a run, not one of Hugging Face."""
    return (directory / RUN_FILE).is_file()


def _changed_at(directory: Path) -> tuple[float, ...]:
    files = (directory / name for name in (RUN_FILE, CONFIG_FILE))
    return tuple(file.stat().st_mtime for file in files if file.is_file())


@lru_cache(maxsize=16)  # the planner asks for each layout
def _read_model(directory: Path, changed_at: tuple[float, ...]) -> ModelSpec:
    """Return the model in a directory, whose files have changed at these times."""
    if not changed_at:
        problem = "is neither a run directory nor a directory of a Hugging Face model"
        fix = f"give a directory with {RUN_FILE} and checkpoints, or one that save_pretrained has written"
        raise UserError(FIELD, str(directory), problem, fix)
    try:
        if not is_run_directory(directory):
            return load_model_spec(str(directory))
        # The network of the run is refused before it would be imported.
        run = load_run(directory / RUN_FILE, environment={}, trust=True)
    except UserError as error:
        raise UserError(FIELD, str(directory), f"cannot be read: {error.field} {error.problem}", error.fix) from None
    if run.model.implementation is not None:
        fix = "use a run of Phalanx's transformer"
        raise UserError(FIELD, str(directory), "has a network of its own (model.implementation)", fix)
    if run.adapter is not None:
        fix = "export the run with `phalanx export`, which merges them, and use that directory"
        raise UserError(FIELD, str(directory), "has adapters", fix)
    return run.model.without_tuning
