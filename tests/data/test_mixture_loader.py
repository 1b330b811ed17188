"""Batches of mixed sources: equal at any number of ranks, each sequence once in an epoch, resumed at any step."""

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.loader import TokenLoader
from phalanx.data.mixture_loader import MixtureLoader
from phalanx.spec.errors import UserError
from phalanx.spec.mixture import SourceSpec
from tests.helpers.batches import batch_rows
from tests.helpers.indexed_pairs import write_indexed_pair

SEQ_LEN = 4
TOKENS_OF_SOURCE = 10_000


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Three sources of 20, 7 and 33 sequences, in which a token identifies its source and position."""
    folder = tmp_path_factory.mktemp("sources")
    pairs = []
    for number, sequences in enumerate((20, 7, 33)):
        first = number * TOKENS_OF_SOURCE
        tokens = range(first, first + sequences * SEQ_LEN + 2)
        cuts = [tokens[:5], tokens[5:6], tokens[6:]]
        pairs.append(IndexedDataset(write_indexed_pair(folder / f"source{number}", cuts)))
    return pairs


def open_loader(datasets, weights=(5, 2, 3), per_step=8, rank=0, ranks=1, seed=3, epochs=None):
    specs = [
        SourceSpec(name=f"source{number}", path="-", weight=weight, epochs=(epochs or {}).get(number))
        for number, weight in enumerate(weights)
    ]
    loaders = [TokenLoader(dataset, SEQ_LEN, 1, seed) for dataset in datasets]
    return MixtureLoader(loaders, specs, per_step, rank, ranks)


weights = st.tuples(*[st.integers(1, 20)] * 3)


@settings(max_examples=40, deadline=None)
@given(weights=weights, ranks=st.integers(1, 64), extra=st.integers(0, 9), step=st.integers(0, 10**6))
def test_ranks_share_the_batch_of_one_rank(datasets, weights, ranks, extra, step):
    per_step = ranks + extra
    whole = batch_rows(open_loader(datasets, weights, per_step).step(step))
    shares = [batch_rows(open_loader(datasets, weights, per_step, rank, ranks).step(step)) for rank in range(ranks)]
    assert [row for rows in shares for row in rows] == whole


@settings(max_examples=40, deadline=None)
@given(weights=weights, ranks=st.sampled_from([1, 2, 3, 7, 64]), per_step=st.integers(64, 100))
def test_mixture_has_shares_and_each_sequence_once_in_an_epoch(datasets, weights, ranks, per_step):
    """In every prefix that ends with a step, and on any number of ranks."""
    loaders = [open_loader(datasets, weights, per_step, rank, ranks) for rank in range(ranks)]
    tokens = np.zeros((0, SEQ_LEN), np.int64)
    for step in range(4):
        tokens = np.concatenate([tokens, *(loader.step(step).tokens for loader in loaders)])
        sources = tokens[:, 0] // TOKENS_OF_SOURCE
        for source, weight in enumerate(weights):
            assert abs(np.count_nonzero(sources == source) * sum(weights) - len(tokens) * weight) < sum(weights)
    for source, dataset in enumerate(datasets):
        own = tokens[sources == source]
        sequences_per_epoch = (dataset.size - 1) // SEQ_LEN
        for first in range(0, len(own), sequences_per_epoch):
            ids = own[first : first + sequences_per_epoch].ravel()
            assert len(np.unique(ids)) == len(ids)


def test_source_has_the_order_of_a_run_with_it_alone(datasets):
    rows = [row for step in range(9) for row in batch_rows(open_loader(datasets).step(step))]
    for source, dataset in enumerate(datasets):
        own = [row for row in rows if row[0][0] // TOKENS_OF_SOURCE == source]
        assert own == batch_rows(TokenLoader(dataset, SEQ_LEN, len(own), seed=3).step(0))


def test_mixture_of_one_source_equals_the_run_without_mixture(datasets):
    for step in range(8):
        alone = TokenLoader(datasets[0], SEQ_LEN, 8, seed=3).step(step)
        assert batch_rows(open_loader(datasets[:1], [0.4]).step(step)) == batch_rows(alone)


@settings(max_examples=30, deadline=None)
@given(weights=weights, step=st.integers(0, 50), ranks=st.integers(1, 8))
def test_resumed_run_equals_the_uninterrupted_one_on_other_ranks(datasets, weights, step, ranks):
    uninterrupted = open_loader(datasets, weights)
    state = json.loads(json.dumps(uninterrupted.state(step)))
    resumed = [open_loader(datasets, weights, rank=rank, ranks=ranks) for rank in range(ranks)]
    for loader in resumed:
        loader.resume(state)
    for number in range(step, step + 3):
        rows = [row for loader in resumed for row in batch_rows(loader.step(number))]
        assert rows == batch_rows(uninterrupted.step(number))


def test_resume_with_resized_steps_continues_after_the_last_sequence(datasets):
    loader = open_loader(datasets, per_step=6)
    loader.resume(open_loader(datasets, per_step=4).state(3))
    assert batch_rows(loader.step(3)) == batch_rows(open_loader(datasets, per_step=6).step(2))
    loader.skip_steps(2)
    assert batch_rows(loader.step(3)) == batch_rows(open_loader(datasets, per_step=6).step(4))


def test_resume_refuses_another_seed(datasets):
    with pytest.raises(UserError, match="differs from the checkpoint") as caught:
        open_loader(datasets, seed=4).resume(open_loader(datasets).state(2))
    assert caught.value.field == "training.seed"


@settings(max_examples=40, deadline=None)
@given(first=weights, then=weights, steps=st.integers(0, 9))
def test_resume_with_other_weights_continues_each_source(datasets, first, then, steps):
    """Within an epoch no sequence comes twice, and the new shares are exact from the resume on.

    With equal shares the old order continues, of which this is a window."""
    before, after = open_loader(datasets, first, per_step=5), open_loader(datasets, then, per_step=4)
    after.resume(json.loads(json.dumps(before.state(steps))))
    rows = [row for step in range(steps) for row in batch_rows(before.step(step))]
    new_rows = [row for step in range(steps, steps + 4) for row in batch_rows(after.step(step))]
    bound = 2 if before.order.shares == after.order.shares else 1
    for source, (dataset, weight) in enumerate(zip(datasets, then, strict=True)):
        of_source = [row for row in new_rows if row[0][0] // TOKENS_OF_SOURCE == source]
        assert abs(len(of_source) * sum(then) - len(new_rows) * weight) < bound * sum(then)
        own = [row for row in rows if row[0][0] // TOKENS_OF_SOURCE == source] + of_source
        alone = TokenLoader(dataset, SEQ_LEN, max(1, len(own)), 3)
        assert own == batch_rows(alone.step(0))[: len(own)]


def test_source_without_weight_keeps_its_position(datasets):
    loaders = [open_loader(datasets, weights, per_step=6) for weights in ((1, 1, 1), (1, 0, 1), (1, 1, 1))]
    loaders[1].resume(loaders[0].state(2))
    loaders[2].resume(json.loads(json.dumps(loaders[1].state(5))))
    rows = batch_rows(loaders[2].step(5))
    own = [row for row in rows if row[0][0] // TOKENS_OF_SOURCE == 1]
    assert own == batch_rows(TokenLoader(datasets[1], SEQ_LEN, 6, 3).step(0))[4:6]


def test_run_of_one_text_continues_in_a_mixture_and_back(datasets):
    alone = TokenLoader(datasets[0], SEQ_LEN, 3, seed=3)
    mixture = open_loader(datasets[:2], (2, 1), per_step=3)
    mixture.resume(alone.state(4))
    own = [row for row in batch_rows(mixture.step(4)) if row[0][0] < TOKENS_OF_SOURCE]
    assert own == batch_rows(alone.step(4))[:2]
    again = TokenLoader(datasets[0], SEQ_LEN, 3, seed=3)
    again.resume(json.loads(json.dumps(mixture.state(5))))
    assert again.state(5)["position"] == 14


def test_resume_refuses_sources_of_which_none_was_read(datasets):
    with pytest.raises(UserError, match="the text, the tokenizer or the held-out part has changed"):
        open_loader(datasets[1:], (1, 1)).resume(TokenLoader(datasets[0], SEQ_LEN, 3, seed=3).state(4))


def test_resume_refuses_changed_text(datasets):
    with pytest.raises(UserError, match="the text, the tokenizer or the held-out part has changed"):
        open_loader([datasets[1], datasets[0], datasets[2]]).resume(open_loader(datasets).state(2))


@settings(max_examples=60, deadline=None)
@given(weights=weights, source=st.integers(0, 2), epochs=st.sampled_from([0.3, 1, 2.5]), per_step=st.integers(1, 9))
def test_epochs_are_exceeded_in_the_named_step(datasets, weights, source, epochs, per_step):
    loader = open_loader(datasets, weights, per_step, epochs={source: epochs})
    limit = int(epochs * ((datasets[source].size - 1) // SEQ_LEN))
    with pytest.raises(UserError, match="and step") as caught:
        loader.check_epochs(10**6)
    assert caught.value.field == f"data.source[{source}].epochs"
    step = int(caught.value.problem.split("and step ")[1].split()[0])
    loader.check_epochs(step - 1)
    with pytest.raises(UserError):
        loader.check_epochs(step)
    rows = [row for number in range(step) for row in batch_rows(loader.step(number))]
    assert sum(row[0][0] // TOKENS_OF_SOURCE == source for row in rows) > limit
    assert sum(row[0][0] // TOKENS_OF_SOURCE == source for row in rows[:-per_step]) <= limit


def test_exceeded_epochs_say_what_to_change(datasets):
    """7 sequences of 2 in 10 are reached with sequence 35 of the run, in step 5 of 8 sequences each."""
    with pytest.raises(UserError) as caught:
        open_loader(datasets, epochs={1: 1}).check_epochs(10)
    assert str(caught.value) == (
        "data.source[1].epochs = 1.0 is too low for 10 steps: source 'source1' has 7 sequences in 1 epoch, and step 5 "
        "needs more; 16 are needed in all\n"
        "  fix: set epochs to at least 2.29, training.steps to at most 4, or weights that give a share of about 0.0875 "
        "instead of 0.2"
    )
    with pytest.raises(UserError) as caught:
        open_loader(datasets[:1], [1], epochs={0: 0.1}).check_epochs(10)
    assert caught.value.fix == "set epochs to at least 4.00"


@pytest.mark.parametrize(("step", "row"), [(0, 0), (0, 5), (3, 0), (3, 5)])
def test_row_is_located_with_its_source(datasets, step, row):
    loader = open_loader(datasets)
    source = loader.step(step).tokens[row, 0] // TOKENS_OF_SOURCE
    assert loader.locate(step, row) == f"row {row} of step {step + 1} (source source{source})"


def test_steps_of_epochs_end_before_a_source_is_read_more_often(datasets):
    """Source 1 has 7 sequences of 2 in 10: its second epoch ends with sequence 69 of the run."""
    assert TokenLoader(datasets[0], SEQ_LEN, 3, seed=3).steps_of_epochs(Fraction(2)) == 40 // 3
    loader = open_loader(datasets, epochs={1: 2})
    steps = loader.steps_of_epochs(Fraction(2))
    loader.check_epochs(steps)
    with pytest.raises(UserError):
        loader.check_epochs(steps + 1)


def test_steps_of_epochs_count_the_rest_in_the_batch_of_a_resume(datasets):
    alone = TokenLoader(datasets[0], SEQ_LEN, 6, seed=3)
    alone.resume(TokenLoader(datasets[0], SEQ_LEN, 3, seed=3).state(2))
    assert alone.steps_of_epochs(Fraction(2)) == 2 + (40 - 2 * 3) // 6
    mixed = open_loader(datasets, per_step=16)
    mixed.resume(open_loader(datasets, per_step=8).state(3))
    whole = open_loader(datasets, per_step=1).steps_of_epochs(Fraction(2))
    assert mixed.steps_of_epochs(Fraction(2)) == 3 + (whole - 3 * 8) // 16
    # Other weights start another order, from the sources' own positions.
    mixed.resume(open_loader(datasets, weights=(1, 1, 1)).state(3))
    assert mixed.steps_of_epochs(Fraction(2)) < 3 + (whole - 3 * 8) // 16
