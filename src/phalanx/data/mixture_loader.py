"""Token batches from several sources that are mixed by weight; equal at any number of ranks.

`MixtureOrder` says which source each sequence has, from the step on from which the sources have their shares. The
sequences of a source follow each other as if the run had this source alone: epoch after epoch, each shuffled by the
same seed. They continue where a phase or a checkpoint with other shares has left them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.loader import SequenceCounter, TokenLoader, changed_data, check_resumable
from phalanx.data.mixture_order import MixtureOrder
from phalanx.data.packing import Batch, pack_rows
from phalanx.data.source_checks import errors_of_source, naming_text
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import plural
from phalanx.spec.mixture import SourceSpec, shares_of_weights
from phalanx.spec.phases import Phase
from phalanx.spec.run import RunSpec


class MixtureLoader(SequenceCounter):
    """Random access to the share of one rank in every global step of a mixture.

    `loaders` read one source each, which `specs` describe. The only state is the number of sequences of this mixture
    before a step, and what was read of each source before the mixture."""

    def __init__(
        self,
        loaders: Sequence[TokenLoader],
        specs: Sequence[SourceSpec],
        sequences_per_step: int,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        super().__init__(sequences_per_step, rank, ranks)
        self.loaders = list(loaders)
        self.specs = list(specs)
        self.seq_len = loaders[0].seq_len
        """Tokens of a sequence (T)."""
        self.order = mixture_order(tuple(shares_of_weights([spec.weight for spec in specs])))
        self._read_before = [(self.seq_len, 0) for _ in specs]
        self._set_first_indices()

    def _set_first_indices(self) -> None:
        """Continue each source where it was left before this mixture."""
        positions = zip(self.loaders, self._read_before, strict=True)
        self._first_indices = np.array([loader.sequences_read(*position) for loader, position in positions])

    def step(self, number: int) -> Batch:
        """Return this rank's rows of global step `number`: [sequences_per_step / ranks, T]."""
        sources, indices = self._locate_rows(number)
        by_source = np.argsort(sources, kind="stable")
        bounds = np.cumsum(np.bincount(sources, minlength=len(self.loaders))).tolist()
        indices = indices[by_source]
        parts = [
            part
            for loader, start, end in zip(self.loaders, [0, *bounds], bounds, strict=False)
            if start < end
            for part in loader.locate_sequences(indices[start:end])
        ]
        batch = pack_rows(parts, self.seq_len, self.loaders[0].mask, by_source)
        return replace(batch, sources=sources.astype(np.int64))

    def sequences(self, step: int) -> list[tuple[TokenLoader, int]]:
        """Return the source's loader and the number in it of each of this rank's sequences of a step."""
        return [(self.loaders[source], int(number)) for source, number in zip(*self._locate_rows(step), strict=True)]

    def _locate_rows(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each of this rank's rows of a step, and the number of its sequence there."""
        sources, indices = self.order.locate(self.first_sequence(step) + self.rows)
        return sources, indices + self._first_indices[sources]

    def locate(self, step: int, row: int) -> str:
        """Return the name of this rank's row `row` of a step, with its source, for errors."""
        sources, _ = self.order.locate(self.first_sequence(step) + self.rows[row : row + 1])
        return f"{super().locate(step, row)} (source {self.specs[sources[0]].name})"

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Values that determine the order of sequences, by name."""
        sources = list(zip(self.specs, self.loaders, self.order.shares, strict=True))
        return {
            "seed": self.loaders[0].seed,
            "sequence": self.seq_len,
            "sequences_per_step": self.sequences_per_step,
            "shares": {spec.name: str(share) for spec, _, share in sources},
            "fingerprint": {spec.name: loader.fingerprint for spec, loader, _ in sources},
        }

    def state(self, step: int) -> dict[str, Any]:
        """Return the position of the run before step `step`, for a checkpoint (JSON-able).

        "sequences" of this mixture; "read", of each source, the length of the sequences it was last cut into, and how
        many of them come before the next, from the first epoch of the run on."""
        sequences = self.first_sequence(step)
        read = {
            spec.name: [self.seq_len, self._sequences_of(source, step)] if share else list(self._read_before[source])
            for source, (spec, share) in enumerate(zip(self.specs, self.order.shares, strict=True))
        }
        return {"step": step, "sequences": sequences, "read": read, **self.identity}

    def resume(self, state: dict[str, Any]) -> None:
        """Resume from the state in a checkpoint, perhaps with other sources, shares, lengths or sizes of steps.

        Each source continues after what the run has read of it (`TokenLoader.sequences_read`). With the shares of the
        checkpoint, their order continues too. Raises UserError if a source has another text than in the checkpoint, or
        none of the texts is in it."""
        check_resumable({"seed": self.loaders[0].seed}, state)
        saved_texts = state.get("fingerprint")
        if isinstance(saved_texts, dict):
            texts = self.identity["fingerprint"]
            if any(saved_texts.get(name, text) != text for name, text in texts.items()):
                raise changed_data()
        positions = [
            loader.read_position(state, spec.name) for loader, spec in zip(self.loaders, self.specs, strict=True)
        ]
        if not any(positions):
            raise changed_data()
        self._read_before = [position or (self.seq_len, 0) for position in positions]
        self._set_first_indices()
        same_order = state["sequence"] == self.seq_len and list(state.get("shares", {}).items()) == list(
            self.identity["shares"].items()
        )
        self.resume_at(state["step"], state["sequences"] if same_order else 0)
        if same_order:
            counts = [self.order.count(source, state["sequences"]) for source in range(len(self.specs))]
            self._first_indices -= np.array(counts)

    def _sequences_of(self, source: int, step: int) -> int:
        """Return how many sequences of a source come before a step, from the first epoch of the run on."""
        return int(self._first_indices[source]) + self.order.count(source, self.first_sequence(step))

    def steps_of_epochs(self, epochs: Fraction) -> int:
        """Return the number of whole steps until a source has been read that often, from the beginning of the run."""
        sources = enumerate(zip(self.loaders, self._first_indices, self.order.shares, strict=True))
        ends = [
            self.order.sequence_of(source, int(epochs * loader.sequences_per_epoch) - int(first))
            for source, (loader, first, share) in sources
            if share
        ]
        return self._step_of(min(ends))

    def check_epochs(self, steps: int) -> None:
        """Raise UserError if `steps` steps of the run would use a source more often than its limit of epochs allows.

        Sequences that a rollback will skip are not known yet, and not counted."""
        for source, (spec, loader) in enumerate(zip(self.specs, self.loaders, strict=True)):
            if spec.epochs is None or not spec.weight:
                continue
            available = math.floor(Fraction(str(spec.epochs)) * loader.sequences_per_epoch)
            needed = self._sequences_of(source, steps)
            if needed <= available:
                continue
            first = int(self._first_indices[source])
            last_step = self._step_of(self.order.sequence_of(source, max(0, available - first)))
            problem = (
                f"is too low for {steps} steps: source {spec.name!r} has {plural(available, 'sequence')} in "
                f"{spec.epochs:g} epoch{'' if spec.epochs == 1 else 's'}, and step {last_step + 1} needs more; "
                f"{needed} are needed in all"
            )
            fixes = [f"epochs to at least {math.ceil(100 * needed / loader.sequences_per_epoch) / 100:.2f}"]
            if last_step:
                fixes.append(f"training.steps to at most {last_step}")
            if len(self.specs) > 1 and available > first:
                share = float(self.order.shares[source])
                largest_share = share * (available - first) / (needed - first)
                fixes.append(f"weights that give a share of about {largest_share:.3g} instead of {share:.3g}")
            raise UserError(f"data.source[{source}].epochs", spec.epochs, problem, f"set {_join_alternatives(fixes)}")

    def epochs_in(self, source: int, first_step: int, end: int) -> float:
        """Return how often steps read the text of a source."""
        sequences = self._sequences_of(source, end) - self._sequences_of(source, first_step)
        return sequences / self.loaders[source].sequences_per_epoch if sequences else 0.0


def describe_mixtures(mixtures: Sequence[tuple[Phase, MixtureLoader]], step: int) -> list[str]:
    """Return a line on each source: its share, and how often the steps of a run after `step` read its text.

    The start message has the shares of later phases."""
    if not mixtures:
        return []
    first = mixtures[0][1]
    shares = first.order.shares
    change = next((phase for phase, mixture in mixtures if mixture.order.shares != shares), None)
    extent = "of the run" if change is None else f"until {change.name}"
    lines = []
    for source, spec in enumerate(first.specs):
        epochs = sum(mixture.epochs_in(source, max(step, phase.first_step), phase.end) for phase, mixture in mixtures)
        share = f"{float(shares[source]):.4g} of the tokens {extent}"
        lines.append(
            f"source {spec.name}: {share}, {first.loaders[source].dataset.size:,} tokens, read {epochs:.3g} times"
        )
    return lines


def _join_alternatives(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])}, or {words[-1]}" if len(words) > 1 else words[0]


@lru_cache
def mixture_order(shares: tuple[Fraction, ...]) -> MixtureOrder:
    """Return the order of shares, which phases with the same shares have in common."""
    return MixtureOrder(shares)


def open_mixture(
    run: RunSpec, datasets: Sequence[IndexedDataset], sequences: int, rank: int = 0, ranks: int = 1
) -> MixtureLoader:
    """Return a rank's loader of a mixture from the tokens of its sources.

    Raises UserError if a source with a weight does not fill one sequence."""
    training = run.training
    loaders = []
    for number, (dataset, spec) in enumerate(zip(datasets, run.data.source, strict=True)):
        with errors_of_source(f"data.source[{number}].path"), naming_text(dataset.prefix, spec.path):
            loader = TokenLoader(
                dataset,
                training.seq_len,
                1,
                training.seed,
                mask_documents=run.data.mask_documents,
                too_long=spec.too_long or run.data.too_long,
            )
            if spec.weight:
                loader.require_one_sequence()
        loaders.append(loader)
    return MixtureLoader(loaders, run.data.source, sequences, rank, ranks)
