"""How many calls a member may have under way, and how often it may begin one: who floods the coordinator is told to
come later, and the others are served."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from phalanx.swarm.coordinator.update_checks import BUSY, UpdateRejected

MAX_CONCURRENT_CALLS = 6
"""Calls of a member: twice what a node has, for it may not know yet that a link broke."""
CALLS_PER_SECOND = 100.0
MAX_BURST = 500.0
"""Calls that it may begin: a node needs some five in a round, and small models have several rounds in a second. A small
one is half a millisecond's work, so that who floods takes a twentieth of a core."""


class RateLimiter:
    """A token bucket for each member: it fills by `CALLS_PER_SECOND`, holds `MAX_BURST`, and each call takes one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._active_calls: Counter[str] = Counter()
        self._tokens: dict[str, tuple[float, float]] = {}
        """Tokens, and when they were counted."""

    @contextmanager
    def limited(self, member: str) -> Iterator[None]:
        """Around a call. Raises UpdateRejected if it is one too many."""
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
