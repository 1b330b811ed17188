"""Every source of a run checks its ids and targets before a step trains on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.data.prepare import prepare
from phalanx.spec.errors import UserError
from phalanx.train.training_data import open_training_data
from tests.helpers.small_runs import DENSE, make_trainer, small_run

SMALL_VOCAB = {"model": {**DENSE, "vocab_size": 100}}
"""A model without the ids of small letters of the byte tokenizer, which the start of a run would refuse."""


class Letters:
    """A dataset of equal samples."""

    def __init__(self, seq_len: int, target: int) -> None:
        self.sample = ([1] * seq_len, [target] * seq_len)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.sample


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, r"data\.train = '.*' has the token id \d+ at position"),
        ({"data.streaming": True}, r"data\.train = \[.*\] has the token id \d+ at position"),
        (
            {"data.dataset": {"class": f"{__name__}:Letters", "target": -7}},
            r"data\.dataset = '.*:Letters' has the target -7 at position 0 of sample \d \(row 0 of step 1\)",
        ),
    ],
    ids=["prepared", "streamed", "dataset"],
)
def test_loader_refuses_ids_outside_vocabulary(
    changes: dict[str, Any], problem: str, documents: Path, tmp_path: Path
) -> None:
    run = small_run(documents, tmp_path, {**SMALL_VOCAB, **changes})
    loader = open_training_data(run, prepare(run.data)).loader(run, 8, 0, 1)
    with pytest.raises(UserError, match=problem):
        loader.step(0)


def test_loader_leaves_targets_to_loss_of_the_user(documents: Path, tmp_path: Path) -> None:
    dataset = {"class": f"{__name__}:Letters", "target": -7}
    run = small_run(documents, tmp_path, {"data.dataset": dataset, "training.loss": "my_loss:any"})
    assert open_training_data(run, prepare(run.data)).loader(run, 8, 0, 1).step(0).targets.max() == -7


def test_evaluation_refuses_ids_outside_vocabulary(documents: Path, tmp_path: Path) -> None:
    trainer = make_trainer(small_run(documents, tmp_path, SMALL_VOCAB))
    with pytest.raises(UserError, match=r"data\.held_out = '.*' has the token id \d+ at .*of evaluation batch 0, but"):
        trainer.evaluate()
