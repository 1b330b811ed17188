"""`training.seconds`: a run that is given a time has as many steps as fit, and keeps that number."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.runs.create import is_finished, read_run_directory
from phalanx.runs.metrics import read_metrics
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run, run_from_table
from phalanx.spec.files.write import to_toml
from phalanx.testing.processes import run_python
from phalanx.train.time_budget import DECISION_STEPS, LATEST_DECISION_SHARE, steps_in_time, with_decided_steps
from phalanx.train.trainer import in_memory_identity

RUN = """
name = "timed"
[model]
preset = "tiny"
hidden_size = 32
num_layers = 1
num_heads = 2
ffn_hidden_size = 64
[data]
tokenizer = "bytes"
[training]
seconds = 5
seq_len = 32
tokens_per_step = 256
precision = "auto"
[optimizer]
warmup_steps = 5
[evaluation]
prompt = "def "
samples = 3
tokens = 1000
"""


@given(step_seconds=st.floats(0.01, 1.0), first=st.floats(0.0, 3.0), seconds=st.floats(20.0, 500.0))
def test_steps_in_time_fill_the_time(step_seconds: float, first: float, seconds: float) -> None:
    """A slow first step costs its time, and is not taken for the speed of the others."""
    measured = [first + step_seconds]
    while (steps := steps_in_time(seconds, 0, measured)) is None:
        measured.append(step_seconds)
    assert seconds - step_seconds * 1.001 <= first + steps * step_seconds <= seconds * 1.001
    assert len(measured) >= DECISION_STEPS or sum(measured) >= LATEST_DECISION_SHARE * seconds


def test_steps_in_time_decides_earlier_where_steps_are_long() -> None:
    assert steps_in_time(100, 0, [10.0, 10.0]) is None
    assert steps_in_time(100, 0, [10.0, 10.0, 10.0]) == 10
    assert steps_in_time(100, 40, [10.0, 10.0, 10.0]) == 50


@pytest.mark.parametrize(("step_seconds", "enough"), [([8.0], 32), ([3.0, 5.0], 16), ([2.0, 2.0, 2.1], 9)])
def test_steps_in_time_refuses_time_for_fewer_than_three_steps(step_seconds: list[float], enough: int) -> None:
    """The proposed time is enough for three steps and the first one's start."""
    message = rf"training\.seconds = 5 is too short for 3 steps: the first .* use at least {enough} with --resume"
    with pytest.raises(UserError, match=f"(?s){message}"):
        steps_in_time(5, 0, step_seconds)
    steps_in_time(enough, 0, step_seconds)


def test_run_has_either_steps_or_seconds() -> None:
    with pytest.raises(UserError, match=r"training\.seconds = 9.*combined with training\.steps = 10"):
        run_from_table({"training": {"steps": 10, "seconds": 9}})


def test_seconds_are_refused_where_steps_must_be_known() -> None:
    layout = {"data_parallel": "parameter_server", "max_staleness": 1}
    with pytest.raises(UserError, match=r"training\.seconds.*different steps"):
        run_from_table({"training": {"seconds": 9}, "layout": layout})
    with pytest.raises(UserError, match=r"training\.seconds.*fixed number of steps"):
        run_from_table({"training": {"seconds": 9}, "swarm": {"method": "diloco"}})


def test_run_with_seconds_round_trips_before_and_after_its_steps_are_decided(tmp_path: Path) -> None:
    run = run_from_table({"training": {"seconds": 9, "precision": "auto"}})
    decided = with_decided_steps(run, 60)
    assert (decided.training.steps, decided.training.seconds, decided.optimizer.warmup_steps) == (60, None, 30)
    for index, variant in enumerate((run, decided)):
        file = tmp_path / f"{index}.toml"
        file.write_text(to_toml(variant))
        assert load_run(file, environment={}) == variant


def test_precision_that_is_set_again_is_not_measured(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(to_toml(run_from_table({"training": {"precision": "auto"}})))
    training = load_run(file, ["training.precision=fp64"], environment={}).training
    assert (training.precision, training.auto_precision) == ("fp64", False)


def test_copies_in_memory_are_of_the_run_before_and_after_its_steps_are_decided() -> None:
    run = run_from_table({"training": {"seconds": 9}})
    assert in_memory_identity(run) == in_memory_identity(with_decided_steps(run, 60))


@pytest.fixture(scope="module")
def timed_run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run file, and what training on it printed."""
    file = tmp_path_factory.mktemp("timed") / "run.toml"
    file.write_text(f"output_dir = '{file.parent}'\n{RUN}".replace("[data]", f"[data]\ntrain = ['{text}']"))
    return file, train(file)


def train(file: Path, *options: str, code: int = 0) -> str:
    result = run_python([sys.executable, "-m", "phalanx", "train", str(file), *options], text=True)
    assert result.returncode == code, result.stderr
    return result.stdout + result.stderr


def test_run_with_seconds_decides_steps_precision_and_shows_samples(timed_run: tuple[Path, str]) -> None:
    file, output = timed_run
    directory = file.parent / "timed"
    run = read_run_directory(directory)[0]
    assert run.training.seconds is None
    assert run.training.steps == read_metrics(directory)[-1]["step"] > DECISION_STEPS
    assert is_finished(directory)
    assert not run.training.auto_precision
    assert f"{run.training.steps} steps fit into 5 s" in output
    assert output.count("sample after step") == 3


def test_resumed_run_keeps_steps_that_were_decided(timed_run: tuple[Path, str]) -> None:
    file, _ = timed_run
    steps = read_run_directory(file.parent / "timed")[0].training.steps
    assert f"the run is complete: step {steps:,} is its last" in train(file, "--resume")
    assert read_run_directory(file.parent / "timed")[0].training.steps == steps


def test_train_refuses_seconds_too_short_for_three_steps(timed_run: tuple[Path, str]) -> None:
    output = train(timed_run[0], "--nproc", "2", "--set", "training.seconds=0.001", "--set", "name=short", code=2)
    assert "training.seconds = 0.001 is too short for 3 steps" in output
    assert "restarting from" not in output
