"""Who calls too often, or too much at the same time, is told to come later; others are not."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from phalanx.swarm.coordinator.update_checks import UpdateRejected
from phalanx.swarm.rpc.rate_limit import A_SECOND, AT_ONCE, UNDER_WAY, RateLimiter


def test_rate_limiter_rejects_too_many_concurrent_calls_per_node():
    pace = RateLimiter()
    with ExitStack() as calls:
        for _ in range(UNDER_WAY):
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

    assert begun() == AT_ONCE
    now = 2.0
    assert begun() == 2 * A_SECOND
    now = 1e6
    assert begun() == AT_ONCE
    with pace.limited("bob"):
        pass
