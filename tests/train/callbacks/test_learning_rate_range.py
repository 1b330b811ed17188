"""A range test on the real trainer: the rate of each step, and the end at a divergence."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.plan.advice.learning_rate_range import range_test_run
from phalanx.report.run_data import read_run
from phalanx.spec.errors import UserError
from phalanx.train import worker
from phalanx.train.create_run import create_run
from phalanx.train.rank_options import RankOptions
from tests.helpers.cli_runner import command_json
from tests.helpers.small_runs import small_run
from tests.helpers.trained_runs import write_run_file


def test_rate_rises_exponentially_until_the_loss_diverges(text: Path, tmp_path: Path) -> None:
    run = range_test_run(small_run(text, tmp_path, {}), 1e-4, 1e4, 24)
    directory = create_run(run, 1, resume=False)
    assert worker.run_rank(directory, RankOptions(resume=True, trust=True)) == 0
    data = read_run(directory)
    rates = [line["learning_rate"] for line in data.step_metrics]
    assert rates == pytest.approx([10 ** (-4 + 8 * step / 23) for step in range(len(rates))])
    assert 10 < len(rates) < 24
    assert data.finish_reason is not None
    assert " is above 2 x " in data.finish_reason


def test_lr_range_leaves_run_file_and_has_a_suggestion() -> None:
    file = write_run_file("ranged", {"training.steps": 500})
    before = file.read_bytes()
    tested = command_json("debug", "lr-range", file, "--low", "1e-5", "--high", "100", "--steps", "60")
    assert file.read_bytes() == before
    assert Path(tested["run_dir"]) == file.parent / "ranged-lr-range"
    assert len(tested["losses"]) == len(tested["rates"]) < 60
    assert tested["rates"][0] < tested["suggestion"] < tested["rates"][-1]
    with pytest.raises(UserError, match="name = 'ranged-lr-range' is that of a run in "):
        command_json("debug", "lr-range", file)
    # AdamW trains this model well with rates between these.
    assert 1e-3 < tested["suggestion"] < 0.3
