"""Shares of sources in prefixes and windows of a run, in exact arithmetic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.mixture_order import MixtureOrder
from phalanx.spec.mixture import shares_of_weights

weights = st.lists(
    st.one_of(st.integers(1, 9), st.integers(1, 400), st.sampled_from([0.1, 0.7, 2.5])), min_size=1, max_size=9
)


def deviations(order, sequences):
    """Return D times the sequences of each source beyond its share, [sources, sequences + 1], for each prefix."""
    sources, _ = order.locate(np.arange(sequences))
    is_of_source = np.arange(len(order.shares))[:, None] == sources
    counts = np.concatenate([np.zeros((len(order.shares), 1), np.int64), is_of_source.cumsum(axis=1)], axis=1)
    shares = np.array([int(share * order.period) for share in order.shares])
    return counts * order.period - shares[:, None] * np.arange(sequences + 1)


@settings(max_examples=150, deadline=None)
@given(weights=weights)
def test_prefixes_are_less_than_one_sequence_off_and_windows_less_than_two(weights):
    order = MixtureOrder(shares_of_weights(weights))
    off = deviations(order, 2 * order.period + 3)
    assert abs(off).max() < order.period
    assert (off.max(axis=1) - off.min(axis=1)).max() < 2 * order.period


def test_prefixes_are_less_than_one_sequence_off_when_the_nearest_order_is_not():
    """With these weights the order of (j + 1/2) / share is almost three sequences off."""
    order = MixtureOrder(shares_of_weights([33, 1, 1, 1, 1, 1, 1, 1]))
    assert abs(deviations(order, order.period)).max() < order.period


@settings(max_examples=100, deadline=None)
@given(weights=weights, start=st.integers(0, 10**12))
def test_each_sequence_of_a_source_is_at_one_place_of_the_run(weights, start):
    order = MixtureOrder(shares_of_weights(weights))
    sources, indices = order.locate(start + np.arange(300))
    for source in range(len(weights)):
        own = indices[sources == source]
        first = order.count(source, start)
        assert own.tolist() == list(range(first, first + len(own)))
        assert order.count(source, start + 300) == first + len(own)
    for sequence, source, index in zip(start + np.arange(300), sources, indices, strict=True):
        assert order.sequence_of(int(source), int(index)) == sequence


def test_order_of_one_source_is_its_own():
    sources, indices = MixtureOrder(shares_of_weights([0.3])).locate(np.arange(9))
    assert sources.tolist() == [0] * 9
    assert indices.tolist() == list(range(9))


@pytest.mark.parametrize(("weights", "period"), [([0.7, 0.3], 10), ([3, 1], 4), ([0.1] * 3, 3), ([1e4, 0.5], 20001)])
def test_shares_are_those_of_the_decimals_in_the_run_file(weights, period):
    assert MixtureOrder(shares_of_weights(weights)).period == period
