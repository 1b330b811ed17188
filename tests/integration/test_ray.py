"""A run on workers of Ray Train, in the environment of `make test-ray`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from phalanx.runs.metrics import read_metrics
from phalanx.spec.files.write import to_toml
from tests.helpers.small_runs import make_trainer, small_run, train_until

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-ray" / "bin" / "python"
STEPS = 4


@pytest.mark.skipif(not PYTHON.exists(), reason="Ray is not installed: make test-ray")
@pytest.mark.timeout(400)
def test_workers_of_ray_train_have_losses_of_single_process(text: Path, tmp_path: Path) -> None:
    changes = {"training.steps": STEPS, "layout.data_parallel": "zero3", "cluster.device": "cpu"}
    file = tmp_path / "run.toml"
    file.write_text(to_toml(small_run(text, tmp_path, {**changes, "name": "ray"})))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [str(PYTHON), str(ROOT / "examples" / "ray_train.py"), str(file), "2"]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    single_process = train_until(make_trainer(small_run(text, tmp_path / "alone", changes)), STEPS)
    trained = [record for record in read_metrics(tmp_path / "ray") if "loss" in record]
    steps = [(record["loss"], record["grad_norm"]) for record in trained]
    assert steps == [pytest.approx(step, rel=1e-10) for step in single_process]
