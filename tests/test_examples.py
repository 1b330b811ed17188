"""The examples run, and the notebook contains its computed outputs."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx

EXAMPLES = Path(__file__).parents[1] / "examples"
SHORT_EXAMPLES = ("plan_a_cluster", "train_tiny", "custom_module", "custom_schedule")
MAX_LINES = 40


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty directory, because examples write into the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_example(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Run an example in this process without arguments, and return its output."""
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("name", SHORT_EXAMPLES)
def test_example_is_short(name: str):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= MAX_LINES


def test_plan_a_cluster_prints_layouts_memory_and_traffic(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    stdout = run_example("plan_a_cluster", capsys, monkeypatch)
    assert stdout.count("P(OOM)") == 5
    assert "GiB optimizer state" in stdout
    assert "reduce_scatter" in stdout or "all_reduce" in stdout


def test_train_tiny_trains_reports_and_samples(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    stdout = run_example("train_tiny", capsys, monkeypatch)
    assert "finished after step 40" in stdout
    assert "held total" in stdout
    assert "\ndef " in stdout


def test_stop_early_does_not_compare_losses_on_other_text():
    callback = runpy.run_path(str(EXAMPLES / "stop_early.py"))["StopEarly"](patience=2)
    reasons: list[str] = []

    class Trainer:
        finish = staticmethod(reasons.append)

    losses = {"a": (3.0, 2.0, 2.5), "b": (4.0, 3.5, 3.6)}
    for text, held_out_losses in losses.items():
        for loss in held_out_losses:
            callback.on_evaluation_end(Trainer(), {"held_out_loss": loss, "held_out_set": text})
        resumed = type(callback)(patience=2)
        resumed.load_state_dict(json.loads(json.dumps(callback.state_dict())))
        callback = resumed
    assert not reasons, "each text had one evaluation without a better loss"
    callback.on_evaluation_end(Trainer(), {"held_out_loss": 3.7, "held_out_set": "b"})
    assert reasons == ["no better loss than 3.5000 in 2 evaluations"]


def test_custom_module_reduces_loss(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    stdout = run_example("custom_module", capsys, monkeypatch)
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in stdout.splitlines()]
    assert len(losses) == 5
    assert losses[-1] < 0.1 * losses[0]


def test_custom_schedule_beats_1f1b(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, empty_folder: Path
):
    stdout = run_example("custom_schedule", capsys, monkeypatch)
    published, eager = (float(line.split(": ")[1].split(" s")[0]) for line in stdout.splitlines())
    assert eager < published
    assert (empty_folder / "eager.csv").read_text().startswith("0F0,0F1")


def test_custom_module_is_equal_on_two_ranks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(EXAMPLES / "custom_module.py"), "zero2"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(phalanx.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines()[0] == run_example("custom_module", capsys, monkeypatch).splitlines()[0], done.stderr


def notebook_cells() -> list[dict[str, Any]]:
    """Return the code cells of the notebook."""
    notebook = json.loads((EXAMPLES / "phalanx.ipynb").read_text())
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_notebook_has_outputs_and_no_errors():
    outputs = [output for cell in notebook_cells() for output in cell["outputs"]]
    assert all(cell["execution_count"] for cell in notebook_cells())
    assert [output for output in outputs if output["output_type"] == "error"] == []
    assert sum("text/html" in output.get("data", {}) for output in outputs) >= 3


def test_notebook_cells_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    namespace: dict[str, Any] = {"__name__": "notebook"}
    for cell in notebook_cells():
        if "needs-pandas" not in cell["metadata"].get("tags", []) or find_spec("pandas"):
            exec("".join(cell["source"]), namespace)
    assert namespace["result"].exit_reason == "finished"
    assert namespace["check"].ok


def train_example(file: str, folder: Path, *settings: str) -> str:
    """Train a run file of the examples on two ranks for two steps, and return its output."""
    settings = ("training.steps=2", f"output_dir={folder}", f"data.cache={folder}", *settings)
    overrides = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "phalanx", "train", file, "--nproc", "2", *overrides]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_own_parts_train_from_their_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "held-out loss" in train_example("own_parts.toml", tmp_path)


def test_engine_generates_with_the_weights_of_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    stdout = train_example("update_engine.toml", tmp_path, "callbacks.engine.every=2", "optimizer.learning_rate=1e-5")
    model, tokenizer = phalanx.load_model(tmp_path / "update-engine")
    ids = torch.tensor(tokenizer.encode_batch(["def "])[0])
    expected = phalanx.generate(model, ids, 24, temperature=0.0)
    assert f"step 2: {bytes(expected.tolist())!r}" in stdout
