"""A node with too many calls per second, or at the same time, must retry later; other nodes need not."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from phalanx.swarm.coordinator.update_checks import UpdateRejected
from phalanx.swarm.rpc.rate_limit import CALLS_PER_SECOND, MAX_BURST, MAX_CONCURRENT_CALLS, RateLimiter


def test_rate_limiter_rejects_too_many_concurrent_calls_per_node():
    limiter = RateLimiter()
    with ExitStack() as calls:
        for _ in range(MAX_CONCURRENT_CALLS):
            calls.enter_context(limiter.limited("ann"))
        with pytest.raises(UpdateRejected, match="busy: too many calls"):
            calls.enter_context(limiter.limited("ann"))
        calls.enter_context(limiter.limited("bob"))
    with limiter.limited("ann"):
        pass


def test_rate_limiter_allows_burst_then_limits_calls_per_second():
    now = 0.0
    limiter = RateLimiter(lambda: now)

    def count_accepted_calls() -> int:
        """Return the number of calls before one is rejected."""
        for count in range(1000):
            try:
                with limiter.limited("ann"):
                    pass
            except UpdateRejected:
                return count
        return 1000

    assert count_accepted_calls() == MAX_BURST
    now = 2.0
    assert count_accepted_calls() == 2 * CALLS_PER_SECOND
    now = 1e6
    assert count_accepted_calls() == MAX_BURST
    with limiter.limited("bob"):
        pass
