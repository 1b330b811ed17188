"""Loader of the user's datasets that have a state: they resume by it, instead of being read again.

The state is what the dataset returns, or its iterator: `state_dict` and `load_state_dict` (StatefulDataLoader of
torchdata, StreamingDataLoader of MosaicML, IterableDataset of Hugging Face), or `get_state` and `set_state` (Grain). It
is saved as JSON and never as pickles, so it may contain numbers, text, bytes, lists, dicts, arrays and tensors."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np
import torch

from phalanx.data.dataset_loader import IterableDatasetLoader, MapDatasetLoader, open_dataset
from phalanx.data.packing import Batch
from phalanx.spec.components import ComponentSpec
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import plural

MAX_SAVED_STATES = 64
"""Steps whose states are kept: more than the steps that are read ahead."""
STATE_METHODS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))


class StatefulDatasetLoader(IterableDatasetLoader):
    """Rows of a dataset with a state, which a checkpoint contains."""

    def __init__(
        self,
        dataset: Iterable[Any],
        spec: ComponentSpec,
        seq_len: int,
        sequences_per_step: int,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.ranks = ranks
        self._iterator: Iterator[Any] | None = None
        self._states: dict[int, Any] = {0: None}
        super().__init__(dataset, spec, seq_len, sequences_per_step, rank, ranks)

    def _iterate_samples(self) -> Iterator[Any]:
        """Yield samples epoch after epoch. The first may be empty, because a state may be that of an epoch's end."""
        num_empty = 0
        while num_empty < 2:
            num_empty += 1
            iterator = self._iterator or iter(self.dataset)
            self._iterator = iterator
            for sample in iterator:
                num_empty = 0
                yield sample
            self._iterator = None
        raise UserError("data.dataset", self.spec.class_path, "has no samples", "return a dataset with samples")

    def step(self, number: int) -> Batch:
        """Return this rank's rows of global step `number`, and keep the state after it."""
        batch = super().step(number)
        self._save_state(number + 1)
        return batch

    def state(self, step: int) -> dict[str, Any]:
        """Return the position of the run before step `step`, for a checkpoint, with the state of the dataset."""
        return {**super().state(step), "ranks": self.ranks, "dataset_state": self._states[step]}

    def resume(self, state: dict[str, Any]) -> None:
        """Resume from the state in a checkpoint. One without the dataset's state is read again up to its position.

        Raises UserError if the checkpoint has another dataset or other lengths, or is of another number of ranks."""
        if "dataset_state" not in state:
            super().resume(state)
            return
        if state["ranks"] != self.ranks:
            saved = plural(state["ranks"], "data-parallel rank")
            problem = f"has the state of {saved} in the checkpoint, but this run has {self.ranks}"
            fix = f"resume with {saved}, or start a new run"
            raise UserError("data.dataset", self.spec.class_path, problem, fix)
        self._iterator = None
        super().resume({**state, "samples_read": 0})
        self.resume_at(state["step"], state["samples_read"])
        if state["dataset_state"] is not None:
            self._load_state(decode_state(state["dataset_state"]))
        self._states = {state["step"]: state["dataset_state"]}

    def skip_steps(self, steps: int) -> None:
        """Skip the samples of `steps` steps from the position at which the run resumes."""
        super().skip_steps(steps)
        self._save_state(self._next_step)

    def _load_state(self, state: Any) -> None:
        if _state_methods(self.dataset) is None:
            self._iterator = iter(self.dataset)
        owner = self._iterator or self.dataset
        methods = _state_methods(owner)
        assert methods is not None
        getattr(owner, methods[1])(state)

    def _save_state(self, step: int) -> None:
        owner = self.dataset if _state_methods(self.dataset) else self._iterator
        methods = _state_methods(owner)
        # An iterator that has ended has no state; the next one begins an epoch.
        state = None if methods is None else encode_state(getattr(owner, methods[0])(), self.spec)
        self._states[step] = state
        self._states.pop(step - MAX_SAVED_STATES, None)


def open_user_dataset(
    dataset: Any, spec: ComponentSpec, seq_len: int, sequences_per_step: int, seed: int, rank: int = 0, ranks: int = 1
) -> MapDatasetLoader | IterableDatasetLoader:
    """Return the loader of a dataset: by its state if it has one, else as `open_dataset`.

    Raises UserError if it is neither a map-style nor an iterable dataset, or is empty."""
    if has_state(dataset):
        return StatefulDatasetLoader(dataset, spec, seq_len, sequences_per_step, rank, ranks)
    return open_dataset(dataset, spec, seq_len, sequences_per_step, seed, rank, ranks)


def has_state(dataset: Any) -> bool:
    """Return whether an iterable dataset, or else its iterator, has a state. One that is read by index needs none."""
    is_indexed = isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")
    if is_indexed or isinstance(dataset, Iterator) or not isinstance(dataset, Iterable):
        return False
    return _state_methods(dataset) is not None or _state_methods(iter(dataset)) is not None


def _state_methods(owner: Any) -> tuple[str, str] | None:
    """Return the names of the methods that return and set a state; None without them."""
    pairs = (pair for pair in STATE_METHODS if all(callable(getattr(owner, name, None)) for name in pair))
    return next(pairs, None)


def encode_state(value: Any, spec: ComponentSpec) -> Any:
    """Return a state as JSON values. Raises UserError for a value that would have to be pickled."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode_state(item, spec) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode_state(key, spec), encode_state(item, spec)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [encode_state(item, spec) for item in value]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        return {"tensor": encode_state(value.detach().cpu().numpy(), spec)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        array = np.asarray(value)
        content = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
        return {"array": [array.dtype.str, list(array.shape), content]}
    problem = f"has a state with a value of type {type(value).__name__}, which cannot be saved without pickles"
    fix = "return numbers, text, bytes, lists, dicts, arrays or tensors from its state_dict"
    raise UserError("data.dataset", spec.class_path, problem, fix)


def decode_state(value: Any) -> Any:
    """Return the state that `encode_state` has encoded."""
    if isinstance(value, list):
        return [decode_state(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {decode_state(key): decode_state(item) for key, item in content}
    if kind == "tuple":
        return tuple(decode_state(item) for item in content)
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "tensor":
        return torch.from_numpy(decode_state(content))
    dtype, shape, encoded = content
    return np.frombuffer(base64.b64decode(encoded), dtype).reshape(shape).copy()
