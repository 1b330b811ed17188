"""Limits on the number of concurrent calls of a member, and on their rate.

A member that floods the coordinator must retry later, so that the other members are served.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from phalanx.swarm.coordinator.update_checks import BUSY, UpdateRejected

MAX_CONCURRENT_CALLS = 6
"""Maximum number of concurrent calls: twice a node's need, in case of an unnoticed link failure."""
CALLS_PER_SECOND = 100.0
MAX_BURST = 500.0
"""Maximum number of calls at once.

A node makes about five per round, and small models have several rounds per second. A small call takes 0.5 ms, so that a
flood takes a twentieth of a core.
"""


class RateLimiter:
    """A token bucket per member.

    It gains `CALLS_PER_SECOND` tokens, contains at most `MAX_BURST`, and a call takes one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._active_calls: Counter[str] = Counter()
        self._tokens: dict[str, tuple[float, float]] = {}
        """Tokens of each member, and the time of their count."""

    @contextmanager
    def limited(self, member: str) -> Iterator[None]:
        """Count a call of a member while it runs; raise UpdateRejected if the member exceeds a limit."""
        with self._lock:
            now = self._clock()
            tokens, counted_at = self._tokens.get(member, (MAX_BURST, now))
            tokens = min(MAX_BURST, tokens + CALLS_PER_SECOND * (now - counted_at))
            if self._active_calls[member] >= MAX_CONCURRENT_CALLS or tokens < 1:
                self._tokens[member] = tokens, now
                raise UpdateRejected(f"{BUSY}: too many calls of this member")
            self._tokens[member] = tokens - 1, now
            self._active_calls[member] += 1
        try:
            yield
        finally:
            with self._lock:
                self._active_calls[member] -= 1
