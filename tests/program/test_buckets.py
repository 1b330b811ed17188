from __future__ import annotations

import pytest

from phalanx.program.buckets import (
    LARGE_MESSAGE_BYTES,
    chunk_by_bytes,
    ddp_bucket_names,
    fill_buckets,
    may_reduce_together,
    zero_bucket_bytes,
    zero_bucket_names,
)
from phalanx.program.rank_tensors import RankTensors
from phalanx.spec.formatting import MIB
from phalanx.spec.layout import Layout

SIZES = {"embedding": 60, "w1": 30, "w2": 10, "w3": 50, "head": 20}


def test_bucket_is_full_when_it_reaches_its_limit():
    assert fill_buckets(SIZES, 60, SIZES.__getitem__) == [["head", "w3"], ["w2", "w1", "embedding"]]
    assert fill_buckets(SIZES, 70, SIZES.__getitem__) == [["head", "w3"], ["w2", "w1", "embedding"]]
    assert fill_buckets(SIZES, 71, SIZES.__getitem__) == [["head", "w3", "w2"], ["w1", "embedding"]]
    assert fill_buckets({}, 1, SIZES.__getitem__) == []


def test_first_bucket_has_a_limit_of_its_own():
    filled = fill_buckets(SIZES, 60, SIZES.__getitem__, first_limit=1)
    assert filled == [["head"], ["w3", "w2"], ["w1", "embedding"]]


def test_parameters_of_different_kinds_share_no_bucket():
    filled = fill_buckets(SIZES, 1000, SIZES.__getitem__, kind=lambda name: name.startswith("w"))
    assert filled == [["head"], ["w3", "w2", "w1"], ["embedding"]]


def test_zero_buckets_of_experts_are_separate():
    shapes = {"a": (4, 4), "experts": (2, 4, 4), "b": (4, 4)}
    rank = RankTensors(
        dense={"a": shapes["a"], "b": shapes["b"]},
        shards=2,
        expert={"experts": shapes["experts"]},
        expert_shards=1,
        names=tuple(shapes),
    )
    assert zero_bucket_names(rank, Layout(data_parallel="zero1"), 4) == [["b"], ["experts"], ["a"]]


def test_zero_bucket_is_at_most_half_a_piece_of_offloaded_rows():
    files = {"data_parallel": "zero1", "offload": "nvme", "offload_directory": "/tmp"}
    assert zero_bucket_bytes(Layout(data_parallel="zero1", bucket_mb=25), ranks=2) == 25 * MIB
    assert zero_bucket_bytes(Layout(**files, bucket_mb=25), ranks=2) == 16 * MIB
    assert zero_bucket_bytes(Layout(**files, bucket_mb=25), ranks=8) == 25 * MIB


@pytest.mark.parametrize(("first_bucket_mb", "expected"), [(None, [["c", "b"], ["a"]]), (0.5, [["c"], ["b", "a"]])])
def test_ddp_buckets_follow_limits_of_layout(first_bucket_mb, expected):
    shapes = dict.fromkeys("abc", (MIB // 4,))
    assert ddp_bucket_names(shapes, Layout(bucket_mb=2, first_bucket_mb=first_bucket_mb), 4) == expected


def test_two_large_or_offloaded_buckets_are_reduced_one_after_the_other():
    assert may_reduce_together(LARGE_MESSAGE_BYTES + 1, LARGE_MESSAGE_BYTES, "none")
    assert not may_reduce_together(LARGE_MESSAGE_BYTES + 1, LARGE_MESSAGE_BYTES + 1, "none")
    assert not may_reduce_together(1, 1, "cpu")


def test_chunk_has_at_most_its_limit_except_a_single_larger_item():
    assert chunk_by_bytes([3, 3, 5, 20, 1], 8, nbytes=int) == [[3, 3], [5], [20], [1]]
