"""A node that calls too often, or too often at the same time, must retry later; others need not."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from phalanx.swarm.coordinator.update_checks import UpdateRejected
from phalanx.swarm.rpc.rate_limit import CALLS_PER_SECOND, MAX_BURST, MAX_CONCURRENT_CALLS, RateLimiter


def test_rate_limiter_rejects_too_many_concurrent_calls_per_node():
    pace = RateLimiter()
    with ExitStack() as calls:
        for _ in range(MAX_CONCURRENT_CALLS):
            calls.enter_context(pace.limited("ann"))
        with pytest.raises(UpdateRejected, match="busy: too many calls"):
            calls.enter_context(pace.limited("ann"))
        calls.enter_context(pace.limited("bob"))
    with pace.limited("ann"):
        pass


def test_rate_limiter_allows_burst_then_limits_calls_per_second():
    now = 0.0
    pace = RateLimiter(lambda: now)

    def begun() -> int:
        """How many until one is too many."""
        for count in range(1000):
            try:
                with pace.limited("ann"):
                    pass
            except UpdateRejected:
                return count
        return 1000

    assert begun() == MAX_BURST
    now = 2.0
    assert begun() == 2 * CALLS_PER_SECOND
    now = 1e6
    assert begun() == MAX_BURST
    with pace.limited("bob"):
        pass
