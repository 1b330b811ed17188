"""Errors that mean only that another rank is gone, and ranks that differ from the majority."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from phalanx.debug.collective_log import is_peer_loss, minority_ranks


@pytest.mark.parametrize(
    ("error", "loss"),
    [
        ("RuntimeError: Timed out waiting 1000ms for recv operation to complete", True),
        ("RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4", True),
        ("DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.", True),
        (
            "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3384, remote process exited or there was a network",
            True,
        ),
        (
            "DistBackendError: Watchdog caught collective operation timeout: ran for 10 milliseconds before timing out",
            True,
        ),
        ("RuntimeError: [enforce fail at gloo/transport/tcp/device.cc:84] Unable to find address for: nosuch0", False),
        ("DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3384, unhandled cuda error", False),
        ("ValueError: no such file", False),
    ],
)
def test_is_peer_loss_classifies_error_messages(error: str, loss: bool) -> None:
    assert is_peer_loss(error) is loss


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 2), min_size=1))
@example({0: 1, 1: 2})
def test_minority_ranks_exclude_majority(values: dict[int, int]) -> None:
    few = minority_ranks(values)
    if 0 < len(few) < len(values):
        most = {values[rank] for rank in values if rank not in few}
        assert len(most) == 1
        assert not most & {values[rank] for rank in few}
