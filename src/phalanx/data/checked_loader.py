"""Check of token ids and targets on the host.

Kernels on a device do not name an invalid id, or train on it silently."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from phalanx.data.loader import StepLoader
from phalanx.data.packing import IGNORE_INDEX, Batch
from phalanx.spec.errors import UserError


class CheckedLoader:
    """A loader whose batches have only ids and targets of the model's vocabulary."""

    def __init__(
        self, loader: StepLoader, field: str, source: object, *, vocab_size: int, checks_targets: bool = True
    ) -> None:
        """Check the batches of a loader whose tokens come from `source`, the value of `field`.

        Unless `checks_targets`, the user's own loss defines what a target is."""
        self.loader = loader
        self.field = field
        self.source = source
        self.vocab_size = vocab_size
        self.checks_targets = checks_targets

    def step(self, number: int) -> Batch:
        """Return this rank's rows of global step `number`.

        Raises UserError if an id or a target is not in the vocabulary."""
        batch = self.loader.step(number)
        locate = partial(self.locate, number)
        check_ids(batch, self.field, self.source, self.vocab_size, locate, self.checks_targets)
        return batch

    def state(self, step: int) -> dict[str, Any]:
        """Return the position of the run before step `step`, for a checkpoint."""
        return self.loader.state(step)

    def resume(self, state: dict[str, Any]) -> None:
        """Resume from the state in a checkpoint."""
        self.loader.resume(state)

    def skip_steps(self, steps: int) -> None:
        """Skip the sequences of `steps` steps from the position at which the run resumes."""
        self.loader.skip_steps(steps)

    def locate(self, step: int, row: int) -> str:
        """Return the name of this rank's row `row` of a step, for errors."""
        return self.loader.locate(step, row)


def check_ids(
    batch: Batch, field: str, source: object, vocab_size: int, locate: Callable[[int], str], checks_targets: bool = True
) -> None:
    """Raise UserError for the first token id or target of a batch that is not in the vocabulary.

    Arguments are those of `CheckedLoader`; `locate` returns the name of a row of the batch."""
    last = vocab_size - 1
    allowed = f"0 to {last} (model.vocab_size = {vocab_size})"
    if invalid := _find_first_invalid_id(batch.tokens, vocab_size):
        token = int(batch.tokens[invalid])
        fix = "correct the data" + (f", or set model.vocab_size = {token + 1}" if token > last else "")
        position = f"position {invalid[1]} of {locate(invalid[0])}"
        raise UserError(field, source, f"has the token id {token} at {position}, but ids are {allowed}", fix)
    if checks_targets and (invalid := _find_first_invalid_id(batch.targets, vocab_size, ignored=IGNORE_INDEX)):
        target = int(batch.targets[invalid])
        fix = f"correct the data, or set model.vocab_size = {target + 1}"
        if target < 0:
            fix = f"write {IGNORE_INDEX} where there is no target"
        position = f"position {invalid[1]} of {locate(invalid[0])}"
        problem = f"has the target {target} at {position}, but targets are {allowed}, or {IGNORE_INDEX} to be ignored"
        raise UserError(field, source, problem, fix)


def _find_first_invalid_id(ids: np.ndarray, vocab_size: int, ignored: int | None = None) -> tuple[int, int] | None:
    """Return the row and position of the first id that is neither in the vocabulary nor `ignored`; None without one."""
    # Negative numbers become the largest ones, so that one pass finds both kinds of invalid ids.
    unsigned = ids.view(np.uint64)
    if not ids.size or unsigned.max() < vocab_size:
        return None
    outside = (unsigned >= vocab_size) if ignored is None else (unsigned >= vocab_size) & (ids != ignored)
    if not outside.any():
        return None
    row, position = np.unravel_index(outside.argmax(), ids.shape)
    return int(row), int(position)
