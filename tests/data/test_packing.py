"""Rows of packed documents."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.packing import document_bounds


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 8)).map(lambda begins: {0, *begins}), min_size=1, max_size=4))
def test_document_bounds_are_first_tokens_of_documents_and_token_count(begins: list[set[int]]) -> None:
    starts = np.array([[max(begin for begin in row if begin <= t) for t in range(9)] for row in begins], np.int32)
    bounds = document_bounds(starts)
    assert bounds.dtype == np.int32
    assert bounds.tolist() == [9 * index + begin for index, row in enumerate(begins) for begin in sorted(row)] + [
        9 * len(begins)
    ]
