"""Token batches of a run with phases, each of which reads other lengths, other sizes of steps or another mixture."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.loader import StepLoader, TokenLoader
from phalanx.data.mixture_loader import MixtureLoader, open_mixture
from phalanx.data.packing import Batch
from phalanx.data.source_checks import naming_text
from phalanx.spec.phases import Phase
from phalanx.spec.run import RunSpec

L = TypeVar("L", bound=StepLoader)


class PhasedLoader:
    """The loaders of consecutive phases. A phase starts as a run that resumes from the end of the phase before."""

    def __init__(self, first_steps: Sequence[int], loaders: Sequence[StepLoader]) -> None:
        """Start from step 0. `loaders[i]` reads the steps from `first_steps[i]` on, of which the first is 0."""
        self.first_steps = list(first_steps)
        self.loaders = list(loaders)
        self._skipped: dict[int, int] = {}
        """Steps whose text is skipped before a step, the first of phases with another length of sequences."""
        self._continue_from(0)

    def _continue_from(self, step: int) -> None:
        """Let each phase after that of a step start where the phase before it ends."""
        self._step = step
        for later in range(self._number_at(step) + 1, len(self.loaders)):
            self._start_after_phase_before(later)
            first_step = self.first_steps[later]
            if first_step in self._skipped:
                self._skip_text(first_step, self._skipped[first_step])

    def _start_after_phase_before(self, number: int) -> None:
        self.loaders[number].resume(self.loaders[number - 1].state(self.first_steps[number]))

    def _skip_text(self, step: int, steps: int) -> None:
        """Let a step follow the text that it and the next ones, `steps` with the same length, read until now."""
        number = self._number_at(step)
        last = self._number_at(step + steps - 1)
        for later in range(number + 1, last + 1):
            self._start_after_phase_before(later)
        self.loaders[number].resume({**self.loaders[last].state(step + steps), "step": step})

    def _number_at(self, step: int) -> int:
        return bisect_right(self.first_steps, step) - 1

    def step(self, number: int) -> Batch:
        """Return this rank's rows of global step `number`."""
        return self.loaders[self._number_at(number)].step(number)

    def state(self, step: int) -> dict[str, Any]:
        """Return the position of the run before step `step`, for a checkpoint."""
        later = {str(first_step): steps for first_step, steps in self._skipped.items() if first_step > step}
        return self.loaders[self._number_at(step)].state(step) | ({"skipped_later": later} if later else {})

    def resume(self, state: dict[str, Any]) -> None:
        """Resume from the state in a checkpoint, in the phase that has its next step."""
        self._skipped = {int(first_step): steps for first_step, steps in state.get("skipped_later", {}).items()}
        self.loaders[self._number_at(state["step"])].resume(state)
        self._continue_from(state["step"])

    def skip_steps(self, steps: int) -> None:
        """Skip the sequences of `steps` steps from the position at which the run resumes.

        Phases with another length have other sequences, and skip those of their own steps when they start."""
        end = self._step + steps
        for start, next_start in pairwise([*self._starts_of_lengths(), max(end, self.first_steps[-1] + 1)]):
            first_step = max(start, self._step)
            if first_step < min(next_start, end):
                self._skipped[first_step] = self._skipped.get(first_step, 0) + min(next_start, end) - first_step
        if self._step in self._skipped:
            self._skip_text(self._step, self._skipped.pop(self._step))
        self._continue_from(self._step)

    def _starts_of_lengths(self) -> list[int]:
        """Return the first step of each sequence of phases that have one length."""
        lengths = [loader.state(step)["sequence"] for step, loader in zip(self.first_steps, self.loaders, strict=True)]
        starts = zip(self.first_steps, lengths, [None, *lengths], strict=False)
        return [step for step, length, before in starts if length != before]

    def sequences(self, step: int) -> list[tuple[TokenLoader, int]]:
        """Return the loader and the number in it of each of this rank's sequences of a step."""
        loader = self.loaders[self._number_at(step)]
        assert isinstance(loader, TokenLoader | MixtureLoader)
        return loader.sequences(step)

    def locate(self, step: int, row: int) -> str:
        """Return the name of this rank's row `row` of a step, for errors."""
        return self.loaders[self._number_at(step)].locate(step, row)


def open_token_files(
    run: RunSpec,
    train: IndexedDataset | None,
    sources: Sequence[IndexedDataset],
    sequences: int,
    rank: int = 0,
    ranks: int = 1,
) -> TokenLoader | MixtureLoader:
    """Return a rank's loader of the tokens of `data.train`, or of the sources of a mixture.

    Raises UserError if the tokens do not fill one sequence."""
    if train is None:
        return open_mixture(run, sources, sequences, rank, ranks)
    training = run.training
    mask = run.data.mask_documents
    with naming_text(train.prefix, run.data.train):
        loader = TokenLoader(train, training.seq_len, sequences, training.seed, rank, ranks, mask, run.data.too_long)
    loader.require_one_sequence()
    return loader


def open_phases(run_phases: Sequence[Phase], open_phase: Callable[[Phase], L]) -> L | PhasedLoader:
    """Return the loader of a run: a single one if its phases read alike."""
    settings = [(p.run.training.seq_len, p.run.training.tokens_per_step, p.run.data.source) for p in run_phases]
    if all(setting == settings[0] for setting in settings):
        return open_phase(run_phases[0])
    return PhasedLoader([phase.first_step for phase in run_phases], [open_phase(phase) for phase in run_phases])
