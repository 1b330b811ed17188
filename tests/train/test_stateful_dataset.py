"""Datasets with a state resume by it bit for bit, without being read again; states are JSON, never pickles."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from phalanx.spec.components import ComponentSpec
from phalanx.spec.errors import UserError
from phalanx.train.stateful_dataset import StatefulDatasetLoader, decode_state, encode_state, open_user_dataset

SPEC = ComponentSpec.model_validate({"class": "mine:Dataset"})
SEQ_LEN, ROWS, SAMPLES = 4, 6, 20
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def samples() -> list[torch.Tensor]:
    return [torch.arange(index * 10, index * 10 + SEQ_LEN + 1) for index in range(SAMPLES)]


class CountingStream(IterableDataset[torch.Tensor]):
    """An iterable dataset with a state, which counts the samples that were read."""

    def __init__(self) -> None:
        self.position = 0
        self.num_read = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < SAMPLES:
            self.position += 1
            self.num_read += 1
            yield samples()[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class SavedIterator(Iterator[np.ndarray]):
    """An iterator with the methods of Grain's, whose state are bytes."""

    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> np.ndarray:
        if self.position == SAMPLES:
            raise StopIteration
        self.position += 1
        return samples()[self.position - 1].numpy()

    def get_state(self) -> bytes:
        return json.dumps(self.position).encode()

    def set_state(self, state: bytes) -> None:
        self.position = json.loads(state)


class IteratorsWithState:
    """An iterable dataset whose iterators have the state."""

    def __iter__(self) -> SavedIterator:
        return SavedIterator()


def shuffled_loader() -> StatefulDataLoader[torch.Tensor]:
    """A loader whose sampler has the generator. torchdata 0.11 restores that of the loader for one epoch only."""
    sampler = RandomSampler(samples(), generator=torch.Generator().manual_seed(3))
    return StatefulDataLoader(samples(), batch_size=None, sampler=sampler)


DATASETS = {
    "StatefulDataLoader with shuffling": shuffled_loader,
    "StatefulDataLoader of a stream": lambda: StatefulDataLoader(CountingStream(), batch_size=None),
    "dataset": CountingStream,
    "iterators": IteratorsWithState,
}


def open_loader(dataset: Any, rank: int = 0, ranks: int = 1) -> Any:
    return open_user_dataset(dataset, SPEC, SEQ_LEN, ROWS, seed=1, rank=rank, ranks=ranks)


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS.keys())
@pytest.mark.parametrize("ranks", [1, 2])
def test_dataset_resumes_by_its_state_at_any_step(make: Any, ranks: int) -> None:
    loader = open_loader(make(), ranks - 1, ranks)
    assert isinstance(loader, StatefulDatasetLoader)
    states, batches = [], []
    for step in range(8):  # two epochs, and an epoch's end that is not a step's
        states.append(json.loads(json.dumps(loader.state(step))))
        batches.append(loader.step(step).targets)
    assert states[4]["tokens"] == 4 * ROWS * SEQ_LEN
    for step, state in enumerate(states):
        resumed = open_loader(make(), ranks - 1, ranks)
        resumed.resume(state)
        for number in range(step, 8):
            assert np.array_equal(resumed.step(number).targets, batches[number])
            assert resumed.state(number) == states[number]
        skipped = open_loader(make(), ranks - 1, ranks)
        skipped.resume(state)
        if step < 6:
            skipped.skip_steps(2)
            assert skipped.state(step)["dataset_state"] == states[step + 2]["dataset_state"]
            assert np.array_equal(skipped.step(step).targets, batches[step + 2])


def test_resumed_dataset_does_not_read_earlier_samples() -> None:
    loader = open_loader(CountingStream())
    for step in range(3):
        loader.step(step)
    dataset = CountingStream()
    resumed = open_loader(dataset)
    resumed.resume(loader.state(3))
    resumed.step(3)
    assert dataset.num_read <= ROWS


def test_state_at_the_end_of_an_epoch_continues_with_the_next() -> None:
    loader = open_user_dataset(CountingStream(), SPEC, SEQ_LEN, SAMPLES, seed=1)
    first = loader.step(0)
    resumed = open_user_dataset(CountingStream(), SPEC, SEQ_LEN, SAMPLES, seed=1)
    resumed.resume(loader.state(1))
    assert np.array_equal(resumed.step(1).tokens, first.tokens)


def test_other_number_of_ranks_is_refused() -> None:
    state = open_loader(CountingStream(), 0, 2).state(0)
    with pytest.raises(UserError, match=r"has the state of 2 data-parallel ranks in .* but this run has 3") as caught:
        open_loader(CountingStream(), 0, 3).resume(state)
    assert caught.value.field == "data.dataset"
    assert "resume with 2 data-parallel ranks" in caught.value.fix


def test_checkpoint_without_state_is_read_up_to_its_position() -> None:
    loader = open_loader(CountingStream())
    batches = [loader.step(step).tokens for step in range(3)]
    state = {name: value for name, value in loader.state(2).items() if name not in ("dataset_state", "ranks")}
    resumed = open_loader(CountingStream())
    resumed.resume(state)
    assert np.array_equal(resumed.step(2).tokens, batches[2])


def test_state_is_json_of_plain_values() -> None:
    state: dict[Any, Any] = {
        "numbers": [1, 2.5, True, None, "text"],
        3: (b"bytes", {"nested": ()}),
        "array": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "tensor": torch.get_rng_state()[:8],
        "scalar": np.float32(1.5),
    }
    decoded = decode_state(json.loads(json.dumps(encode_state(state, SPEC))))
    assert decoded["numbers"] == state["numbers"]
    assert decoded[3] == state[3]
    assert np.array_equal(decoded["array"], state["array"])
    assert decoded["array"].dtype == np.uint16
    assert torch.equal(decoded["tensor"], state["tensor"])
    assert decoded["scalar"] == 1.5
    with pytest.raises(UserError, match="a value of type set, which cannot be saved without pickles"):
        encode_state({"seen": {1, 2}}, SPEC)


def test_empty_dataset_is_an_error() -> None:
    loader = open_loader(StatefulDataLoader([], batch_size=None))
    with pytest.raises(UserError, match="has no samples"):
        loader.step(0)


def test_dataset_that_is_read_by_index_needs_no_state() -> None:
    class Samples(list[Any]):
        def state_dict(self) -> dict[str, Any]:
            raise AssertionError

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    assert not isinstance(open_loader(Samples(samples())), StatefulDatasetLoader)
