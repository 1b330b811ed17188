"""Pending gathers of ZeRO-1 and 2. A weight of the model is complete once its bucket has been waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import nn

from phalanx.parallel.data.zero_buckets import Bucket
from phalanx.program.buckets import MAX_BUCKETS_IN_FLIGHT


class WeightGathers:
    """Queue of the buckets to gather, in the order of the forward pass.

    The first `MAX_BUCKETS_IN_FLIGHT` gathers run at the same time, and the end of one starts the next. Ranks wait at
    the same points of the program, so they start all collectives in the same order."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        """Create an empty queue; `buckets` are all buckets in the order of the backward pass."""
        self.buckets = buckets
        self.overlaps_forward = False
        """True if modules wait for their own buckets in the next forward pass."""
        self.pending: deque[Bucket] = deque()
        self._last_bucket_of: dict[nn.Module, int] = {}
        """Index of the last bucket to gather for a module."""

    def add(self, bucket: Bucket) -> None:
        """Add a bucket whose owned rows have their new values."""
        self.pending.append(bucket)
        if len(self.pending) <= MAX_BUCKETS_IN_FLIGHT:
            bucket.start_gather()
        elif not self.overlaps_forward:
            self._finish_first()

    def wait(self) -> None:
        """Finish all gathers."""
        self._finish_until(0)

    def wait_for_module(self, module: nn.Module) -> None:
        """Finish the gathers of a module's parameters, and all before them."""
        if not self.pending:
            return
        if module not in self._last_bucket_of:
            parameters = set(module.parameters())
            is_needed = [any(owned.parameter in parameters for owned in bucket.parameters) for bucket in self.buckets]
            self._last_bucket_of[module] = [*is_needed, True].index(True)
        self._finish_until(self._last_bucket_of[module])

    def discard(self) -> None:
        """Drop all gathers: their rows are out of date, and must not overwrite the rows of this rank."""
        for bucket in self.pending:
            bucket.discard_gather()
        self.pending.clear()

    def _finish_until(self, index: int) -> None:
        """Finish the gathers up to the bucket with this index.

        Buckets are gathered from the largest index to the smallest."""
        while len(self.pending) > index:
            self._finish_first()

    def _finish_first(self) -> None:
        self.pending.popleft().finish_gather()
        if len(self.pending) >= MAX_BUCKETS_IN_FLIGHT:
            self.pending[MAX_BUCKETS_IN_FLIGHT - 1].start_gather()
