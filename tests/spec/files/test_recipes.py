"""Files of `phalanx init --task` are valid runs of the model that they name."""

import json
import tomllib
from pathlib import Path

import pytest

from phalanx.spec.errors import UserError
from phalanx.spec.families.config_json import hf_config
from phalanx.spec.files.load import load_model_spec, load_run
from tests.helpers.cli_runner import command_output

TASKS = ["continue", "sft"]


def write_config(directory: Path, preset: str = "llama3-8b") -> Path:
    """Write the config.json of a preset."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(hf_config(load_model_spec(preset))))
    return directory


@pytest.mark.parametrize("task", TASKS)
def test_file_of_a_task_is_a_run_of_its_model(task: str, tmp_path: Path) -> None:
    model = write_config(tmp_path / "model")
    path = tmp_path / "run.toml"
    command_output("init", path, "--task", task, "--model", model, "--data", "mine.jsonl")
    run = load_run(path, environment={})
    assert run.model.from_hf == str(model)
    assert "mine.jsonl" in (run.data.train or run.data.source[0].path)
    sources = [line for line in path.read_text().splitlines() if "arXiv" in line or "Tulu" in line]
    assert len(sources) >= 2
    assert run.optimizer.learning_rate == tomllib.loads(path.read_text())["optimizer"]["learning_rate"]


def test_rates_follow_the_size_of_the_model(tmp_path: Path) -> None:
    rates = []
    for preset in ("tiny", "llama3-8b", "llama3-70b"):
        model = write_config(tmp_path / preset, preset)
        command_output("init", tmp_path / f"{preset}.toml", "--task", "sft", "--model", model)
        rates.append(load_run(tmp_path / f"{preset}.toml", environment={}).optimizer.learning_rate)
    assert rates == [2e-5, 5e-6, 2e-6]


def test_model_and_data_need_a_task(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--model = 'x' has no effect on a file for pre-training"):
        command_output("init", tmp_path / "run.toml", "--model", "x")
