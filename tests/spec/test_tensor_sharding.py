from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.spec.tensor_sharding import (
    data_parallel_axis,
    has_strided_shards,
    max_shard_elements,
)


def test_max_shard_elements_rounds_rows_up() -> None:
    assert [max_shard_elements((10, 3), ranks) for ranks in (1, 2, 3, 4, 10, 16)] == [30, 15, 12, 9, 3, 3]


@pytest.mark.parametrize(
    ("shape", "ranks", "axis", "strided"),
    [
        ((1, 14336, 4096), 16, 1, False),  # mixtral-8x7b with ep 8 on 128 ranks
        ((8, 14336, 4096), 64, 1, True),
        ((8, 14336, 4096), 8, 0, False),
        ((8, 14336, 4096), 9, 0, False),  # FSDP2 shards other axes than the first equally only
        ((8, 4096), 64, 0, False),  # a router
    ],
)
def test_rows_of_experts_are_sharded_if_experts_are_fewer_than_ranks(
    shape: tuple[int, ...], ranks: int, axis: int, strided: bool
) -> None:
    assert (data_parallel_axis(shape, ranks), has_strided_shards(shape, ranks)) == (axis, strided)


@given(st.integers(1, 9), st.integers(1, 64), st.integers(1, 5), st.integers(1, 12))
def test_shards_of_all_ranks_hold_stack(experts: int, rows: int, columns: int, ranks: int) -> None:
    total = experts * rows * columns
    largest = max_shard_elements((experts, rows, columns), ranks)
    assert largest * ranks >= total
    if experts % ranks == 0 or (rows % ranks == 0 and experts < ranks):
        assert largest * ranks == total
