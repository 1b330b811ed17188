"""Loaders of the user's own datasets: map-style datasets in shuffled order, iterable datasets in their own order.

A sample is a sequence of T + 1 token ids, or a pair of T inputs and T targets, -100 where there is none. Global batches
are equal at any number of ranks, because every rank reads the same order and keeps its own rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from functools import lru_cache
from typing import Any

import numpy as np

from phalanx.data.loader import EpochLoader, SequenceCounter, check_resumable
from phalanx.data.packing import Batch
from phalanx.spec.components import ComponentSpec
from phalanx.spec.errors import UserError


class MapDatasetLoader(EpochLoader):
    """Rows of a dataset with `__len__` and `__getitem__`, shuffled in every epoch."""

    def __init__(
        self,
        dataset: Any,
        spec: ComponentSpec,
        seq_len: int,
        sequences_per_step: int,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        super().__init__(sequences_per_step, seed, rank, ranks)
        self.dataset = dataset
        self.spec = spec
        self.seq_len = seq_len
        self.sequences_per_epoch = len(dataset)
        if not self.sequences_per_epoch:
            raise _dataset_error(spec, "has no samples", "return a dataset with samples")
        self._order = lru_cache(maxsize=2)(
            lambda epoch: np.random.Generator(np.random.PCG64([seed, epoch])).permutation(self.sequences_per_epoch)
        )

    def read_rows(self, epoch: int, indices: np.ndarray) -> Batch:
        """Return samples of an epoch, by their indices in its order."""
        samples = [self.dataset[int(index)] for index in self._order(epoch)[indices]]
        return _build_batch(samples, self.spec, self.seq_len)

    def locate(self, step: int, row: int) -> str:
        """Return the name of this rank's row `row` of a step: the index of its sample in the dataset."""
        epoch, index = divmod(self.first_sequence(step) + int(self.rows[row]), self.sequences_per_epoch)
        return f"sample {self._order(epoch)[index]} ({super().locate(step, row)})"

    @property
    def identity(self) -> dict[str, Any]:
        """Values that determine the order of samples, by name."""
        identity = _dataset_identity(self.spec, self.seq_len, self.sequences_per_step)
        return {"seed": self.seed, "samples": self.sequences_per_epoch, **identity}


class IterableDatasetLoader(SequenceCounter):
    """Rows of a dataset with `__iter__`, in its order. It is iterated again when it ends.

    To resume, it is read again up to the position of the checkpoint."""

    def __init__(
        self,
        dataset: Iterable[Any],
        spec: ComponentSpec,
        seq_len: int,
        sequences_per_step: int,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        super().__init__(sequences_per_step, rank, ranks)
        self.dataset = dataset
        self.spec = spec
        self.seq_len = seq_len
        self._next_step = 0
        self._samples = self._iterate_samples()

    def _iterate_samples(self) -> Iterator[Any]:
        while True:
            has_samples = False
            for sample in self.dataset:
                has_samples = True
                yield sample
            if not has_samples:
                raise _dataset_error(self.spec, "has no samples", "return a dataset with samples")

    def step(self, number: int) -> Batch:
        """Return this rank's rows of global step `number`: [sequences_per_step / ranks, T].

        Raises ValueError if it is not the next step."""
        if number != self._next_step:
            raise ValueError(f"step {number} was requested, but only the next step, {self._next_step}, can be read")
        self._next_step += 1
        samples = [next(self._samples) for _ in range(self.sequences_per_step)]
        return _build_batch([samples[row] for row in self.rows], self.spec, self.seq_len)

    def state(self, step: int) -> dict[str, Any]:
        """Return the position of the run before step `step`, for a checkpoint (JSON-able)."""
        samples = self.first_sequence(step)
        return {"step": step, "samples_read": samples, "tokens": samples * self.seq_len, **self.identity}

    @property
    def identity(self) -> dict[str, Any]:
        """Values that determine the order of samples, by name."""
        return _dataset_identity(self.spec, self.seq_len, self.sequences_per_step)

    def resume(self, state: dict[str, Any]) -> None:
        """Resume from the state in a checkpoint, after its last sample.

        Raises UserError if the checkpoint has another dataset or other lengths. Steps may have another size."""
        check_resumable(self.identity, state)
        self.resume_at(state["step"], state["samples_read"])
        self._next_step = state["step"]
        self._samples = self._iterate_samples()
        self._skip_samples(state["samples_read"])

    def skip_steps(self, steps: int) -> None:
        """Skip the samples of `steps` steps from the position at which the run resumes."""
        self._skip_samples(steps * self.sequences_per_step)
        super().skip_steps(steps)

    def locate(self, step: int, row: int) -> str:
        """Return the name of this rank's row `row` of a step: the number of samples that were read before it."""
        return f"sample {self.first_sequence(step) + int(self.rows[row])} ({super().locate(step, row)})"

    def _skip_samples(self, samples: int) -> None:
        for _ in range(samples):
            next(self._samples)


def open_dataset(
    dataset: Any, spec: ComponentSpec, seq_len: int, sequences_per_step: int, seed: int, rank: int = 0, ranks: int = 1
) -> MapDatasetLoader | IterableDatasetLoader:
    """Return the loader of a dataset: map-style if it has a length, else iterable.

    Raises UserError if it is neither, or it is empty."""
    share = {"sequences_per_step": sequences_per_step, "rank": rank, "ranks": ranks}
    if isinstance(dataset, Sized) and hasattr(dataset, "__getitem__"):
        return MapDatasetLoader(dataset, spec, seq_len, **share, seed=seed)
    if isinstance(dataset, Iterator):
        raise _dataset_error(spec, "returns an iterator, which can be read only once", "return an object with __iter__")
    if isinstance(dataset, Iterable):
        return IterableDatasetLoader(dataset, spec, seq_len, **share)
    problem = "returns neither a map-style nor an iterable dataset"
    raise _dataset_error(spec, problem, "define __len__ and __getitem__, or __iter__")


def _dataset_identity(spec: ComponentSpec, seq_len: int, sequences_per_step: int) -> dict[str, Any]:
    return {"dataset": spec.model_dump(), "sequence": seq_len, "sequences_per_step": sequences_per_step}


def _build_batch(samples: list[Any], spec: ComponentSpec, seq_len: int) -> Batch:
    """Return samples as the rows of a batch. Raises UserError if a sample is of another type or length."""
    for sample in samples:
        if isinstance(sample, Mapping):
            problem = f"has a sample with the keys {', '.join(map(str, sample))}"
            raise _dataset_error(spec, problem, "return token ids, or inputs and targets")
    rows = [sample if isinstance(sample, tuple) else (sample[:-1], sample[1:]) for sample in samples]
    tokens, targets = ([np.asarray(row[index]) for row in rows] for index in (0, 1))
    for row in (*tokens, *targets):
        if row.shape != (seq_len,):
            problem = f"has a sample of {list(row.shape)} inputs or targets, but sequences have [{seq_len}]"
            fix = f"return {seq_len + 1} token ids, or a tuple of {seq_len} inputs and {seq_len} targets"
            raise _dataset_error(spec, problem, fix)
        if row.dtype.kind not in "iu":
            problem = f"has a sample of type {row.dtype}, but ids and targets are integers"
            raise _dataset_error(spec, problem, "return integers")
    if not rows:
        empty = np.zeros((0, seq_len), np.int64)
        return Batch(empty, empty, None)
    stacked_tokens, stacked_targets = (
        np.stack(arrays, dtype=np.int64, casting="unsafe") for arrays in (tokens, targets)
    )
    return Batch(stacked_tokens, stacked_targets, None)


def _dataset_error(spec: ComponentSpec, problem: str, fix: str) -> UserError:
    return UserError("data.dataset", spec.class_path, problem, fix)
