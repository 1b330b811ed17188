"""Batches of a run with phases: a phase starts where the one before ends, also after a resume in any of them."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.loader import TokenLoader
from phalanx.data.mixture_loader import MixtureLoader
from phalanx.data.phased_loader import PhasedLoader
from phalanx.spec.mixture import SourceSpec
from tests.helpers.batches import batch_rows
from tests.helpers.indexed_pairs import write_indexed_pair

TOKENS_OF_SOURCE = 10_000


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Two sources, in which a token identifies its source and position."""
    folder = tmp_path_factory.mktemp("sources")
    pairs = []
    for number, size in enumerate((700, 301)):
        first = number * TOKENS_OF_SOURCE
        tokens = range(first, first + size)
        pairs.append(IndexedDataset(write_indexed_pair(folder / f"source{number}", [tokens[:50], tokens[50:]])))
    return pairs


def open_mixture(datasets, seq_len, weights, per_step, rank=0, ranks=1):
    specs = [SourceSpec(name=f"source{number}", path="-", weight=weight) for number, weight in enumerate(weights)]
    loaders = [TokenLoader(dataset, seq_len, 1, seed=3) for dataset in datasets]
    return MixtureLoader(loaders, specs, per_step, rank, ranks)


phase = st.tuples(
    st.integers(1, 5),
    st.sampled_from([4, 8, 12]),
    st.sampled_from([(1, 1), (3, 1), (1, 4), (1, 0)]),
    st.integers(4, 12),
)
"""Steps, tokens of a sequence, weights, and sequences of a step."""


def open_phases(datasets, phases, rank=0, ranks=1):
    first_steps = np.cumsum([0, *(steps for steps, *_ in phases[:-1])]).tolist()
    loaders = [open_mixture(datasets, *settings, rank, ranks) for _, *settings in phases]
    return PhasedLoader(first_steps, loaders)


@settings(max_examples=60, deadline=None)
@given(phases=st.lists(phase, min_size=1, max_size=4), stop=st.integers(0, 12), ranks=st.integers(1, 4))
def test_run_resumed_in_any_phase_on_other_ranks_equals_the_uninterrupted_one(datasets, phases, stop, ranks):
    uninterrupted = open_phases(datasets, phases)
    steps = sum(phase[0] for phase in phases)
    state = json.loads(json.dumps(uninterrupted.state(stop)))
    resumed = [open_phases(datasets, phases, rank, ranks) for rank in range(ranks)]
    for loader in resumed:
        loader.resume(state)
    for step in range(stop, max(steps, stop + 1)):
        rows = [row for loader in resumed for row in batch_rows(loader.step(step))]
        assert rows == batch_rows(uninterrupted.step(step))


@settings(max_examples=60, deadline=None)
@given(phases=st.lists(phase, min_size=2, max_size=4))
def test_phases_have_their_lengths_and_no_token_twice_in_an_epoch(datasets, phases):
    loader = open_phases(datasets, phases)
    read = [[], []]
    step = 0
    for steps, seq_len, weights, per_step in phases:
        counts = np.zeros(2)
        for _ in range(steps):
            tokens = loader.step(step).tokens
            assert tokens.shape == (per_step, seq_len)
            for source in range(2):
                own = tokens[tokens[:, 0] // TOKENS_OF_SOURCE == source]
                read[source] += [(seq_len, row.tolist()) for row in own]
                counts[source] += len(own)
            step += 1
        if not all(weights):
            assert counts[1] == 0
    for dataset, sequences in zip(datasets, read, strict=True):
        position = (0, 0)  # epoch, and the sequence of it that comes next
        length = None
        for seq_len, tokens in sequences:
            alone = TokenLoader(dataset, seq_len, 1, seed=3)
            if length not in (None, seq_len) and position[1]:
                position = (position[0] + 1, 0)
            length = seq_len
            expected = alone.read_rows(position[0], np.array([position[1]])).tokens[0].tolist()
            assert tokens == expected
            position = divmod(position[0] * alone.sequences_per_epoch + position[1] + 1, alone.sequences_per_epoch)


def test_ramp_of_one_mixture_keeps_its_order(datasets):
    ramp = open_phases(datasets, [(2, 8, (3, 1), 4), (1, 8, (3, 1), 6), (3, 8, (3, 1), 10)])
    rows = [row for step in range(4) for row in batch_rows(ramp.step(step))]
    assert rows == batch_rows(open_mixture(datasets, 8, (3, 1), len(rows)).step(0))


def test_skipped_steps_move_later_phases(datasets):
    phases = [(3, 8, (1, 1), 4), (3, 8, (1, 3), 6)]
    loader = open_phases(datasets, phases)
    loader.resume(loader.state(1))
    loader.skip_steps(2)
    expected = open_phases(datasets, [(5, 8, (1, 1), 4), (3, 8, (1, 3), 6)])
    assert batch_rows(loader.step(1)) == batch_rows(expected.step(3))
    assert batch_rows(loader.step(3)) == batch_rows(expected.step(5))
    assert loader.locate(3, 0).startswith("row 0 of step 4 (source ")


def test_skipped_steps_reach_into_a_phase_with_another_batch(datasets):
    loader = open_phases(datasets, [(3, 8, (1, 1), 4), (9, 8, (1, 1), 6)])
    loader.resume(loader.state(2))
    loader.skip_steps(3)
    text = open_mixture(datasets, 8, (1, 1), 1)
    skipped = 2 * 4 + 4 + 2 * 6
    assert batch_rows(loader.step(2)) == [row for step in range(4) for row in batch_rows(text.step(skipped + step))]
    assert batch_rows(loader.step(3))[0] == batch_rows(text.step(skipped + 4))[0]


def test_skipped_steps_of_a_phase_with_another_length_are_skipped_when_it_starts(datasets):
    phases = [(4, 8, (1, 1), 4), (1, 12, (1, 1), 4), (9, 12, (1, 1), 6)]
    unchanged = open_phases(datasets, phases)
    loader = open_phases(datasets, phases)
    loader.resume(loader.state(3))
    loader.skip_steps(3)
    assert batch_rows(loader.step(4))[0] == batch_rows(unchanged.step(6))[0]
    # A checkpoint between the rollback and that phase.
    resumed = open_phases(datasets, phases)
    resumed.resume(json.loads(json.dumps(loader.state(3))))
    for step in range(3, 8):
        assert batch_rows(resumed.step(step)) == batch_rows(loader.step(step))


def test_increments_of_a_ramp_share_the_order_of_an_epoch(datasets):
    for dataset in datasets:
        dataset.epoch_order.cache_clear()
    ramp = open_phases(datasets, [(1, 8, (3, 1), batch) for batch in (4, 6, 8, 10)])
    for step in range(4):
        ramp.step(step)
    assert [dataset.epoch_order.cache_info().misses for dataset in datasets] == [1, 1]
