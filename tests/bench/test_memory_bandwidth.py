"""Memory bandwidth is measured with arrays larger than the caches, and bytes are counted as STREAM does."""

from __future__ import annotations

import torch

from phalanx.bench.memory_bandwidth import MIN_ARRAY_BYTES, array_bytes, bandwidth, cache_bytes


def test_memory_bandwidth_arrays_are_four_times_cache_size() -> None:
    assert array_bytes(2**30, 1) == 2**32
    assert array_bytes(2**30, 8) == 2**29
    assert array_bytes(0, 2) == array_bytes(2**20, 2) == MIN_ARRAY_BYTES
    assert array_bytes(cache_bytes(torch.device("cpu")), 1) >= 4 * cache_bytes(torch.device("cpu"))


def test_memory_bandwidth_counts_two_arrays_for_copy_and_three_for_triad() -> None:
    copy, triad = bandwidth(torch.device("cpu"), 4000, iterations=2)
    assert (copy["kernel"], copy["moved_bytes"]) == ("copy", 8000)
    assert (triad["kernel"], triad["moved_bytes"]) == ("triad", 12000)
    for row in (copy, triad):
        assert row["bytes_per_second"] == row["moved_bytes"] / row["seconds"]
