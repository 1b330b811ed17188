"""How many calls a member may have under way, and how often it may begin one: who floods the coordinator is told to
come later, and the others are served."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from phalanx.swarm.coordinator.update_checks import BUSY, UpdateRejected

UNDER_WAY = 6
"""Calls of a member: twice what a node has, for it may not know yet that a link broke."""
A_SECOND, AT_ONCE = 100.0, 500.0
"""Calls that it may begin: a node needs some five in a round, and small models have several rounds in a second. A small
one is half a millisecond's work, so that who floods takes a twentieth of a core."""


class RateLimiter:
    """A token bucket for each member: it fills by `A_SECOND`, holds `AT_ONCE`, and each call takes one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._under_way: Counter[str] = Counter()
        self._left: dict[str, tuple[float, float]] = {}
        """Tokens, and when they were counted."""

    @contextmanager
    def limited(self, member: str) -> Iterator[None]:
        """Around a call. Raises Refused if it is one too many."""
        with self._lock:
            now = self._clock()
            tokens, counted_at = self._left.get(member, (AT_ONCE, now))
            tokens = min(AT_ONCE, tokens + A_SECOND * (now - counted_at))
            if self._under_way[member] >= UNDER_WAY or tokens < 1:
                self._left[member] = tokens, now
                raise UpdateRejected(f"{BUSY}: too many calls of this member")
            self._left[member] = tokens - 1, now
            self._under_way[member] += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way[member] -= 1
