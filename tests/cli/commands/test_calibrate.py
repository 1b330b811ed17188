"""`phalanx calibrate` on a trained run, and plans that use its result."""

import json
from functools import partial
from pathlib import Path

import pytest

from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_machine
from phalanx.train.callbacks.records import JsonLines
from phalanx.train.create_run import create_run
from tests.helpers import cli_runner
from tests.helpers.cli_runner import command_json
from tests.helpers.small_runs import make_trainer, small_run, train_to_end

wide_output = partial(cli_runner.command_output, width=200)
STEPS = 8


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory) -> Path:
    changes = {"training.precision": "fp32", "training.steps": STEPS}
    run = small_run(Path(json.__file__).parent, tmp_path_factory.mktemp("trained"), changes)
    directory = create_run(run, 1, resume=False)
    trainer = make_trainer(run)
    train_to_end(trainer, {"metrics": JsonLines()})
    return directory


def test_plan_uses_machine_file_written_by_calibrate(run_directory, tmp_path):
    machine_file = tmp_path / "here.toml"
    text = wide_output("calibrate", run_directory, "--out", machine_file)
    assert "by the others" in text
    assert f"--machine {machine_file}" in text
    machine = load_machine(str(machine_file))
    assert (machine.device, machine.calibration.runs, machine.calibration.precision) == ("cpu", 1, "fp32")
    table = wide_output("plan", run_directory / "run.toml", "--machine", machine_file, "--nproc", 2)
    assert "measured by 1 runs on this machine" in table
    plan = command_json("plan", run_directory / "run.toml", "--machine", machine_file, "--nproc", 2)
    assert plan["measured"] == machine.calibration.identified_constants
    # The machine file as the preset of a run file gives the same plan.
    plan_by_preset = command_json(
        "plan", run_directory / "run.toml", "--set", f"cluster.preset={machine_file}", "--nproc", 2
    )
    assert plan_by_preset["layouts"] == plan["layouts"]


def test_calibrated_prediction_matches_calibration_run_within_10_percent(run_directory, tmp_path):
    result = command_json("calibrate", run_directory, "--out", tmp_path / "here.toml")
    (row,) = result["runs"]
    assert row["after_seconds"] == pytest.approx(row["step_seconds"], rel=0.1)
    assert row["predicted_memory_bytes"] == pytest.approx(row["memory_bytes"], rel=0.1)
    assert result["machine"]["calibration"]["runs"] == 1


def test_calibrate_accepts_benchmark_file_of_bench_command(run_directory, tmp_path):
    file, machine_file = tmp_path / "measured.json", tmp_path / "here.toml"
    cli_runner.command_output("bench", run_directory / "run.toml", "--nproc", 1, "--iterations", 2, "--out", file)
    result = command_json("calibrate", run_directory, file, "--out", machine_file)
    assert [operation["kind"] for operation in result["operations"]] == ["matrix products", "attention", "memory"]
    assert {operation["of"] for operation in result["operations"]} == {"measured.json"}
    assert "measured.json" in machine_file.read_text().partition("\n")[0]
    text = wide_output("calibrate", run_directory, file, "--out", machine_file)
    assert "timed apart" in text


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_calibrate_warns_when_prediction_interval_is_too_wide(run_directory, tmp_path, monkeypatch, options):
    warning = "are too wide to choose a layout: add longer runs"
    for least, wide in ((0.0, True), (100.0, False)):
        monkeypatch.setattr("phalanx.cli.commands.calibrate.MAX_LOG_HALF_WIDTH", least)
        assert (
            warning in cli_runner.command_stderr("calibrate", run_directory, "--out", tmp_path / "here.toml", *options)
        ) is wide


def test_plan_notes_that_machine_preset_is_not_calibrated(run_directory):
    table = wide_output(
        "plan", run_directory / "run.toml", "--machine", "h100", "--nproc", 2, "--set", "training.precision=bf16"
    )
    assert "no run on this machine was measured" in table


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("calibrate", "nowhere"), r"nowhere.*does not exist"),
        (("calibrate", "{run}", "--machine", "h1000"), "h100"),
        (("calibrate", "measured.json"), "RUN_DIR.*benchmarks alone do not determine"),
        (("calibrate", "{run}", "{run}"), "is given twice"),
        (("calibrate", "{run}", "nowhere.json"), "nowhere.json.*cannot be read"),
        (("calibrate", "{run}", "--machine", "nowhere.toml"), "machine file = 'nowhere.toml' does not exist"),
        (("calibrate", "{run}", "--out", "nowhere/machine.toml"), "cannot be written"),
    ],
)
def test_calibrate_raises_user_error_for_invalid_arguments(run_directory, tmp_path, monkeypatch, arguments, problem):
    monkeypatch.chdir(tmp_path)
    command = [argument.format(run=run_directory) for argument in arguments]
    with pytest.raises(UserError, match=problem):
        wide_output(*command)
