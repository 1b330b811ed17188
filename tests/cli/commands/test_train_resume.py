"""`phalanx train --resume` of a complete run, and from an earlier checkpoint, up to the start of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.launch.preflight import lock_run_directory
from phalanx.runs.checkpoints import checkpoints, step_of
from phalanx.spec.errors import UserError
from phalanx.spec.run import RunSpec
from phalanx.train.create_run import check_and_prepare, create_run
from tests.helpers.cli_runner import command_stderr
from tests.helpers.small_runs import make_trainer, small_run, train_to_end

SETTINGS = {"training.steps": 6, "training.precision": "fp32", "checkpoint": {"every": 2, "keep": 9}}


@pytest.fixture
def complete_run(text: Path, tmp_path: Path) -> RunSpec:
    run = small_run(text, tmp_path, SETTINGS)
    create_run(run, 1, resume=False)
    train_to_end(make_trainer(run))
    return run


def test_resume_of_complete_run_says_how_to_train_longer(complete_run: RunSpec) -> None:
    directory = Path(complete_run.output_dir) / complete_run.name
    expected = f"train longer: phalanx train {directory} --resume --set training.steps=12\n"
    for run in (directory, directory / "checkpoints" / "step-00000006"):
        stderr = command_stderr("train", run, "--resume")
        assert stderr.startswith("phalanx: the run is complete: step 6 is its last.")
        assert stderr.endswith(expected)
    assert not (directory / "lock").exists()  # no rank was started


def test_resume_from_a_step_sets_newer_checkpoints_aside_and_checks_against_it(complete_run: RunSpec) -> None:
    run = complete_run.replace(training=complete_run.training.replace(steps=5))
    with pytest.raises(UserError, match=r"training.steps = 5 is less than the 6 completed steps"):
        check_and_prepare(run, 1, resume=True)
    check_and_prepare(run, 1, resume=True, step=4)
    lock = lock_run_directory(run, resume=True, step=4)
    trainer = make_trainer(run)
    assert trainer.resume()[0] == 1
    assert trainer.step == 4
    folder = trainer.checkpointer.directory
    assert [step_of(path) for path in checkpoints(folder)] == [4, 2]
    assert (folder / "step-00000006.abandoned").is_dir()
    assert (folder / "latest").read_text() == "step-00000004\n"
    if lock is not None:
        lock.close()


def test_train_step_requires_resume_and_an_existing_checkpoint(complete_run: RunSpec) -> None:
    directory = Path(complete_run.output_dir) / complete_run.name
    with pytest.raises(UserError, match=r"--step = 4 has no effect without --resume"):
        command_stderr("train", directory, "--step", 4)
    with pytest.raises(UserError, match=r"--step = 5 is not a checkpoint of .*\n  fix: use one of 2, 4, 6"):
        command_stderr("train", directory, "--resume", "--step", 5)
