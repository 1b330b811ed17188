"""A rank's part of the initial weights equals that of one process, and the rank draws little more than this part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx.model import init
from phalanx.model.init import DrawnWeights, initial_weight
from phalanx.parallel.init_parameters import init_parameters
from phalanx.spec.model import ModelSpec
from phalanx.testing import rank_pool
from phalanx.train.training_data import await_checkpoint
from tests.helpers.small_runs import DENSE, MOE, Table, make_trainer, small_run

SHAPE = torch.Size([10, 6])


@pytest.mark.parametrize("block_numbers", [1, 6, 12, 17, 1000])
@pytest.mark.parametrize("rows", [range(10), range(3, 4), range(2, 9), range(9, 10), range(5, 5)])
def test_rows_of_initial_weight_are_those_of_the_whole(
    rows: range, block_numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "BLOCK_NUMBERS", block_numbers)
    spec = ModelSpec(**DENSE)
    full = initial_weight(spec, "embedding.weight", SHAPE, 7)
    part = initial_weight(spec, "embedding.weight", SHAPE, 7, rows)
    assert torch.equal(part[rows.start : rows.stop], full[rows.start : rows.stop])
    assert full.unique().numel() == full.numel()  # no two blocks are drawn alike


def count_numbers_drawn(run_changes: Table, text: Path, folder: Path) -> tuple[int, int]:
    """Return how many numbers this rank draws for matrices, and how many it trains."""
    numbers = 0
    normal = torch.Tensor.normal_

    def counting(tensor: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        nonlocal numbers
        numbers += 0 if tensor.is_meta else tensor.numel()
        return normal(tensor, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init, "BLOCK_NUMBERS", 1)
        patch.setattr(torch.Tensor, "normal_", counting)
        trainer = make_trainer(small_run(text, folder, run_changes))
    parts = trainer.strategy.trainable_parameters.values()
    trained = sum(getattr(part, "_local_tensor", part).numel() for part in parts if part.ndim > 1)
    return numbers, trained


@pytest.mark.parametrize(
    "changes",
    [
        {"model": DENSE, "layout.data_parallel": "zero3"},
        {"model": MOE, "layout.data_parallel": "zero3", "layout.ep": 2},
        {"model": {**DENSE, "num_layers": 4}, "layout.data_parallel": "zero1", "layout.pp": 2},
    ],
    ids=["zero3", "zero3-ep", "zero1-pp"],
)
def test_rank_draws_rows_that_it_trains(changes: Table, text: Path, tmp_path: Path) -> None:
    for drawn, trained in rank_pool(4).run(count_numbers_drawn, changes, text, tmp_path):
        assert 0 < drawn <= 1.1 * trained  # where a row is split, both ranks draw it


def test_resumed_run_draws_no_weights(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run(text, tmp_path, {"training.steps": 1, "training.precision": "fp32"})
    first = make_trainer(run)
    first.save()
    first.checkpointer.wait()
    expected = {name: part.detach().clone() for name, part in first.strategy.trainable_parameters.items()}
    monkeypatch.setattr("phalanx.train.learner.DrawnWeights", None)
    second = make_trainer(run, weights=await_checkpoint)
    assert all(part.isnan().all() for part in second.strategy.trainable_parameters.values())
    second.resume()
    for name, part in second.strategy.trainable_parameters.items():
        assert torch.equal(part, expected[name])


def test_drawn_weights_are_those_of_one_process() -> None:
    from phalanx.model.transformer import Transformer
    from phalanx.parallel.strategy import Strategy

    spec = ModelSpec(**DENSE)
    model = Transformer(spec)
    init_parameters(Strategy(model), DrawnWeights(spec, 3))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, initial_weight(spec, name, parameter.shape, 3))
