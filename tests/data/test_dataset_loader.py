"""Loaders of the user's datasets: equal global batches at any number of ranks, exact resume, clear errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from phalanx.data.dataset_loader import open_dataset
from phalanx.spec.components import ComponentSpec
from phalanx.spec.errors import UserError

SPEC = ComponentSpec.model_validate({"class": "mine:Dataset"})
SEQ_LEN, ROWS = 4, 6


class Samples(list[Any]):
    """A map-style dataset."""


class Stream:
    """The same samples as an iterable dataset."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(self.samples)


def samples(count: int = 10) -> list[np.ndarray]:
    return [np.arange(index * 10, index * 10 + SEQ_LEN + 1) for index in range(count)]


DATASETS = [Samples(samples()), Stream(samples())]


def loader(dataset: Any, rank: int = 0, ranks: int = 1) -> Any:
    return open_dataset(dataset, SPEC, SEQ_LEN, ROWS, seed=1, rank=rank, ranks=ranks)


@pytest.mark.parametrize("dataset", DATASETS, ids=["map", "iterable"])
def test_ranks_share_global_batches(dataset: Any) -> None:
    reference = loader(dataset)
    several = [loader(dataset, rank, 4) for rank in range(4)]
    for step in range(4):
        rows = np.concatenate([part.step(step).tokens for part in several])
        assert np.array_equal(rows, reference.step(step).tokens)


@pytest.mark.parametrize("dataset", DATASETS, ids=["map", "iterable"])
def test_resume_continues_after_last_sample(dataset: Any) -> None:
    uninterrupted = loader(dataset)
    batches = [uninterrupted.step(step).targets for step in range(5)]
    resumed = loader(dataset)
    resumed.resume(uninterrupted.state(2))
    assert np.array_equal(resumed.step(2).targets, batches[2])
    skipped = loader(dataset)
    skipped.resume(uninterrupted.state(2))
    skipped.skip_steps(2)
    assert np.array_equal(skipped.step(2).targets, batches[4])


def test_map_dataset_is_shuffled_in_every_epoch() -> None:
    reference = loader(Samples(samples(ROWS)))
    first, second = (reference.step(step).tokens[:, 0].tolist() for step in range(2))
    assert sorted(first) == sorted(second) == [index * 10 for index in range(ROWS)]
    assert first != second


def test_sample_may_be_pair_of_inputs_and_targets() -> None:
    batch = loader(Stream([([1, 2, 3, 4], [5, -100, 7, 8])])).step(0)
    assert batch.tokens[0].tolist() == [1, 2, 3, 4]
    assert batch.targets[0].tolist() == [5, -100, 7, 8]


@pytest.mark.parametrize(
    ("dataset", "problem"),
    [
        (Samples([]), "has no samples"),
        (Stream([]), "has no samples"),
        (Stream([[1, 2]]), r"has a sample of \[1\] inputs or targets, but sequences have \[4\]"),
        (Stream([[1.5, 2.0, 3.0, 4.0, 5.0]]), "has a sample of type float64, but ids and targets are integers"),
        (3, "returns neither a map-style nor an iterable dataset"),
        (iter([]), "returns an iterator, which can be read only once"),
        (Stream([{"input_ids": [1]}]), "has a sample with the keys input_ids"),
    ],
    ids=["empty", "empty stream", "short", "floats", "number", "iterator", "mapping"],
)
def test_unsuitable_dataset_is_named(dataset: Any, problem: str) -> None:
    with pytest.raises(UserError, match=f"data.dataset = 'mine:Dataset' {problem}"):
        loader(dataset).step(0)


def test_resume_refuses_other_dataset() -> None:
    state = loader(DATASETS[0]).state(2)
    other = open_dataset(DATASETS[0], ComponentSpec.model_validate({"class": "m:D", "n": 2}), SEQ_LEN, ROWS, seed=1)
    with pytest.raises(UserError, match=r"data\.dataset = .*differs from the checkpoint's value"):
        other.resume(state)
