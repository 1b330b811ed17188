"""Every layout trains from its first step to its last evaluation, and resumes, over PyTorch's own ProcessGroupNCCL."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.runs.metrics import read_metrics
from phalanx.spec.files.write import to_toml
from tests.helpers.small_runs import Table, small_run
from tests.null_gpu.layouts import BF16, COVERING, PIPELINES, SINGLE_AXES
from tests.null_gpu.ranks import describe_failures, run_ranks

STEPS, MORE_STEPS = 3, 5


@pytest.mark.parametrize("name", SINGLE_AXES)
def test_layout_trains_evaluates_and_resumes(name: str, documents: Path, tmp_path: Path) -> None:
    train_and_resume(*SINGLE_AXES[name], documents, tmp_path)


@pytest.mark.parametrize("name", PIPELINES)
def test_pipeline_trains_evaluates_and_resumes(name: str, documents: Path, tmp_path: Path) -> None:
    train_and_resume(*PIPELINES[name], documents, tmp_path)


@pytest.mark.parametrize("name", COVERING)
def test_layout_of_covering_set_trains_evaluates_and_resumes(name: str, documents: Path, tmp_path: Path) -> None:
    train_and_resume(*COVERING[name], documents, tmp_path)


@pytest.mark.parametrize("name", ["zero1", "zero3", "zero3-offload", "tp", "ring", "moe-ep-zero3"])
def test_layout_is_profiled(name: str, documents: Path, tmp_path: Path) -> None:
    world_size, changes = SINGLE_AXES[name]
    run = small_run(documents, tmp_path, {**BF16, "training.steps": 4, **changes})
    file = tmp_path / "run.toml"
    file.write_text(to_toml(run))
    arguments = ["phalanx.train", str(file), "--profile-memory", "--profile-steps", "3:4"]
    results = run_ranks("tests.null_gpu.rank", arguments, world_size, tmp_path)
    assert all(result.exit_code == 0 for result in results), describe_failures(results)
    assert len(list((tmp_path / run.name / "measured").glob("rank-*.json"))) == world_size


def train_and_resume(world_size: int, changes: Table, documents: Path, folder: Path) -> None:
    """Train a few steps, and a few more from their checkpoint."""
    run = small_run(documents, folder, {**BF16, **changes})
    file, directory = folder / "run.toml", folder / run.name
    file.write_text(to_toml(run))
    for steps in (STEPS, MORE_STEPS):
        arguments = ["phalanx.train", str(file), "--set", f"training.steps={steps}", "--resume"]
        results = run_ranks("tests.null_gpu.rank", arguments, world_size, folder / f"until{steps}")
        assert all(result.exit_code == 0 for result in results), describe_failures(results)
        records = read_metrics(directory)
        assert max(record["step"] for record in records) == steps
        assert [record["resumed_at_step"] for record in records if "loss" in record][-1] == (
            0 if steps == STEPS else STEPS
        )
        assert [record["step"] for record in records if "held_out_loss" in record][-1] == steps
