"""Hashes of what ranks hold alike are fetched from a GPU at once."""

from __future__ import annotations

import warnings

import pytest
import torch

from phalanx.train.guards.replica_check import _to_host

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU, not even the null GPU")


def test_hashes_on_a_gpu_take_one_copy() -> None:
    hashes = [torch.tensor(index, device="cuda" if index % 2 else "cpu") for index in range(9)]
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            values = _to_host(hashes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert values[::2] == [0, 2, 4, 6, 8]
    assert len([warning for warning in caught if "synchronizing" in str(warning.message)]) == 1
