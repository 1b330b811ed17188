"""The parts of examples/own_parts.py across a restart, and its network under every data parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from phalanx.train.create_run import create_run
from tests.helpers.small_runs import find_examples, make_trainer, small_run, train_until

STEPS = 6
NETWORK = {"model.implementation": "own_parts:Recurrent", "data.mask_documents": False}
PARTS: dict[str, dict[str, Any]] = {
    "model": NETWORK,
    "loss": {"training.loss": {"class": "own_parts:smoothed", "smoothing": 0.2}},
    "optimizer": {"optimizer.implementation": {"class": "own_parts:Lion", "beta2": 0.9}},
    "library optimizer": {"optimizer.implementation": "torch.optim:NAdam"},
    "lr_function": {"optimizer.lr_function": {"class": "own_parts:staircase", "stairs": 3}},
    "map dataset": {"data.dataset": {"class": "own_parts:Counting", "samples": 20}},
    "iterable dataset": {"data.dataset": "own_parts:CountingStream"},
}


def own_run(documents: Path, folder: Path, changes: dict[str, Any]) -> RunSpec:
    model = {"hidden_size": 24, "num_layers": 2, "num_heads": 2, "ffn_hidden_size": 32, "vocab_size": 257}
    common = {"training.steps": STEPS, "checkpoint": {"every": 0}, "model": {**model, "max_seq_len": 64}}
    return small_run(documents, folder, {**common, **changes})


def train_with_restart(run: RunSpec, stop_after: int) -> list[tuple[float, float]]:
    """Train, save and resume after a step; return the losses and norms of all steps, and of an evaluation."""
    find_examples()
    first = make_trainer(run)
    records = train_until(first, stop_after)
    if stop_after < STEPS:
        first.save()
        first.checkpointer.wait()
        second = make_trainer(run)
        second.resume()
        records += train_until(second, STEPS)
        first = second
    return [*records, (first.evaluate()["held_out_loss"], 0.0)]


@pytest.mark.parametrize("part", PARTS)
def test_own_part_resumes_bit_for_bit(part: str, documents: Path, tmp_path: Path) -> None:
    find_examples()
    straight, restarted, plain = (
        train_with_restart(own_run(documents, tmp_path / name, changes), stop_after)
        for name, changes, stop_after in (("a", PARTS[part], STEPS), ("b", PARTS[part], 3), ("c", {}, STEPS))
    )
    assert straight == restarted
    assert straight != plain, "the part has an effect"


@pytest.mark.parametrize(
    "layout",
    [
        {"data_parallel": "ddp"},
        {"data_parallel": "zero1"},
        {"data_parallel": "zero2"},
        {"data_parallel": "zero2", "offload": "cpu"},
        {"data_parallel": "zero3"},
        {"data_parallel": "parameter_server"},
    ],
    ids=lambda layout: "-".join(layout.values()),
)
def test_own_parts_equal_one_process_under_data_parallelism(
    layout: dict[str, str], documents: Path, tmp_path: Path
) -> None:
    changes = {**NETWORK, **PARTS["loss"], **PARTS["library optimizer"], **PARTS["map dataset"]}
    find_examples()
    single_process = train_with_restart(own_run(documents, tmp_path / "one", changes), STEPS)
    run = own_run(documents, tmp_path / "two", {**changes, "layout": layout})
    create_run(run, 2, resume=False)
    for several in rank_pool(2).run(train_with_restart, run, 3):
        for (loss, norm), (expected_loss, expected_norm) in zip(several, single_process, strict=True):
            assert loss == pytest.approx(expected_loss, abs=1e-9)
            assert norm == pytest.approx(expected_norm, abs=1e-9)
