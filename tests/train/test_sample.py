"""Samples during training show what the model generates, and do not change the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.spec.files.load import run_from_table
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from phalanx.train.callbacks.standard import standard_callbacks
from phalanx.train.progress import ProgressDisplay
from phalanx.train.sample import is_sample_due
from tests.helpers.small_runs import MOE, make_trainer, small_run

STEPS = 6
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3": {"layout.data_parallel": "zero3", "model": MOE},
    "tensor": {"layout.tp": 2},
    "pipeline": {"layout.pp": 2, "layout.micro_batch_size": 1},
    "server": {"layout.data_parallel": "parameter_server"},
}


class RecordingProgress(ProgressDisplay):
    """A progress display that records its lines."""

    def __init__(self) -> None:
        super().__init__(0, None, quiet=True)
        self.lines: list[str] = []

    def log(self, text: str) -> None:
        self.lines.append(text)


def train_and_show(run: RunSpec) -> tuple[float, list[str]]:
    trainer, progress = make_trainer(run), RecordingProgress()
    evaluation = trainer.train(standard_callbacks(trainer), progress)
    return evaluation["held_out_loss"], progress.lines


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_on_the_way_do_not_change_training(layout: str, text: Path, tmp_path: Path) -> None:
    changes = {"training.steps": STEPS, "evaluation.prompt": "def ", **LAYOUTS[layout]}
    results = []
    for samples in (1, 3):
        run = small_run(text, tmp_path / str(samples), {**changes, "evaluation.samples": samples})
        results.append(rank_pool(2).run(train_and_show, run))
    for (loss, lines), (loss_with_samples, lines_with_samples) in zip(*results, strict=True):
        assert loss_with_samples == loss
        assert not [line for line in lines if "sample" in line]
        assert [line.split(":")[0] for line in lines_with_samples if "sample" in line] == [
            "sample after step 2",
            "sample after step 4",
        ]


def test_samples_are_at_even_distances_before_the_end() -> None:
    run = run_from_table({"training": {"steps": 10}, "evaluation": {"prompt": "def ", "samples": 3}})
    assert [step for step in range(1, 11) if is_sample_due(run, step)] == [4, 7]
