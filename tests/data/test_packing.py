"""Rows of packed documents."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.packing import (
    IGNORE_INDEX,
    MAX_IDS,
    Batch,
    document_bounds,
    target_ids,
    target_weights,
    token_ids,
    tokens_ahead,
    weighted_tokens,
    weights_ahead,
)


@st.composite
def rows_with_documents(draw: st.DrawFn) -> Batch:
    """Return rows of tokens, of which some have no target, perhaps with documents."""
    rows, width = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    tokens = np.array(draw(st.lists(st.integers(0, 9), min_size=rows * (width + 1), max_size=rows * (width + 1))))
    tokens = tokens.reshape(rows, width + 1)
    hidden = np.array(draw(st.lists(st.booleans(), min_size=rows * width, max_size=rows * width))).reshape(rows, width)
    begins = [draw(st.sets(st.integers(0, width - 1))) | {0} for _ in range(rows)]
    starts = np.array([[max(b for b in row if b <= t) for t in range(width)] for row in begins], np.int32)
    targets = np.where(hidden, IGNORE_INDEX, tokens[:, 1:])
    return Batch(tokens[:, :-1], targets, draw(st.sampled_from([None, starts])))


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 8)).map(lambda begins: {0, *begins}), min_size=1, max_size=4))
def test_document_bounds_are_first_tokens_of_documents_and_token_count(begins: list[set[int]]) -> None:
    starts = np.array([[max(begin for begin in row if begin <= t) for t in range(9)] for row in begins], np.int32)
    bounds = document_bounds(starts)
    assert bounds.dtype == np.int32
    assert bounds.tolist() == [9 * index + begin for index, row in enumerate(begins) for begin in sorted(row)] + [
        9 * len(begins)
    ]


@settings(max_examples=50)
@given(rows_with_documents(), st.integers(1, 4))
def test_tokens_ahead_are_later_tokens_with_targets_in_the_same_document(batch: Batch, count: int) -> None:
    tokens, targets = tokens_ahead(batch, count)
    rows, width = batch.tokens.shape
    for layer, row, position in np.ndindex(count, rows, width):
        later = position + 1 + layer
        starts = batch.document_starts
        is_inside = later < width and (starts is None or starts[row, later] == starts[row, position])
        assert targets[layer, row, position] == (batch.targets[row, later] if is_inside else IGNORE_INDEX)
        if later < width:
            assert tokens[layer, row, position] == batch.tokens[row, later]
    assert (tokens >= 0).all()


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, MAX_IDS - 1), st.integers(0, 1000)), min_size=1))
def test_tokens_of_a_file_have_their_ids_and_weights(pairs: list[tuple[int, int]]) -> None:
    ids, hundredths = np.array(pairs).T
    tokens = weighted_tokens(ids.astype(np.int32), hundredths / 100)
    assert tokens.dtype == np.int32
    assert np.array_equal(token_ids(tokens), ids)
    assert np.array_equal(target_ids(tokens), np.where(hundredths > 0, ids, IGNORE_INDEX))
    weights = target_weights(tokens)
    assert np.array_equal(hundredths > 0 if weights is None else weights, hundredths / 100)
    # A file without weights has plain ids.
    assert np.array_equal(tokens[hundredths == 100], ids[hundredths == 100])
    assert target_weights(ids.astype(np.uint32)) is None


@settings(max_examples=20)
@given(rows_with_documents(), st.integers(1, 4))
def test_weights_ahead_are_those_of_the_targets_ahead(batch: Batch, count: int) -> None:
    _, targets = tokens_ahead(batch, count)
    weights = weights_ahead(batch.targets + 0.5, count)
    is_target = targets != IGNORE_INDEX
    assert np.array_equal(weights[is_target], targets[is_target] + 0.5)
