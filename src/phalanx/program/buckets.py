"""Buckets in which data-parallel ranks reduce gradients and gather weights, and pieces in which they step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Reversible
from operator import attrgetter
from typing import TypeVar

from phalanx.program.rank_tensors import RankTensors
from phalanx.spec.formatting import MIB
from phalanx.spec.layout import Layout, OffloadName
from phalanx.spec.parameter_shapes import Shapes, num_elements

T = TypeVar("T")
MAX_BUCKETS_IN_FLIGHT = 2
"""Maximum number of buckets that ZeRO-1 and 2 reduce or gather at a time. With two in flight, NCCL never waits for the
next one. More would only bridge uneven buckets, and the buffers of four take up to a fifth of a rank's memory."""
LARGE_MESSAGE_BYTES = 2**28
"""Size above which buckets are reduced one at a time. Buckets of experts are large if ranks without one pad them."""
PIECE_BYTES: dict[OffloadName, int] = {"none": 2**28, "cpu": 2**28, "nvme": 2**24}
"""Size in bytes of the trained rows that ranks step at once, and whose gradients are cast at once. Of files, three
pieces are in memory at a time."""


def fill_buckets(
    parameters: Reversible[T],
    limit: float,
    nbytes: Callable[[T], int],
    kind: Callable[[T], object] = lambda _: None,
    first_limit: float | None = None,
) -> list[list[T]]:
    """Return buckets in the order of the backward pass, from the last parameter of the model to the first.

    A bucket is full when it has at least `limit` bytes, the first bucket when it has `first_limit`. Parameters of a
    different `kind`, which cannot share a message, start a new bucket."""
    buckets: list[list[T]] = []
    size = 0
    full_size = limit
    previous_kind: object = None
    for parameter in reversed(parameters):
        parameter_kind = kind(parameter)
        if not buckets or size >= full_size or parameter_kind != previous_kind:
            full_size = first_limit if first_limit is not None and not buckets else limit
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += nbytes(parameter)
        previous_kind = parameter_kind
    return buckets


def zero_bucket_bytes(layout: Layout, ranks: int) -> float:
    """Return the size at which a bucket of ZeRO-1 or 2 is full, among `ranks` that share the rows of the model.

    Offloaded rows are stepped in pieces of complete buckets."""
    limit = layout.bucket_mb * MIB
    return limit if layout.offload == "none" else min(limit, PIECE_BYTES[layout.offload] * ranks / 2)


def zero_bucket_names(rank: RankTensors, layout: Layout, bytes_per_element: int) -> list[list[str]]:
    """Return the parameter names of each bucket of ZeRO-1 and 2, as the trainer fills them.

    `bytes_per_element` is the size of a number of parameters and gradients. Experts with data-parallel ranks of their
    own form separate buckets."""
    shapes = rank.trained
    return fill_buckets(
        shapes,
        zero_bucket_bytes(layout, rank.shards),
        nbytes=lambda name: bytes_per_element * num_elements(shapes[name]),
        kind=lambda name: name in rank.expert,
    )


def may_reduce_together(message_bytes: int, previous_bytes: int, offload: OffloadName) -> bool:
    """Return whether ZeRO may start to reduce a bucket before the reduction of the previous bucket has ended.

    Offloaded gradients leave the device as soon as they are summed."""
    return offload == "none" and min(message_bytes, previous_bytes) <= LARGE_MESSAGE_BYTES


def ddp_bucket_names(shapes: Shapes, layout: Layout, bytes_per_element: int) -> list[list[str]]:
    """Return the parameter names of each bucket of PyTorch's DDP, which gradients fill in the order of backward passes.

    Source: torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size."""
    first_limit = None if layout.first_bucket_mb is None else int(layout.first_bucket_mb * MIB)
    return fill_buckets(
        shapes,
        int(layout.bucket_mb * MIB),
        nbytes=lambda name: bytes_per_element * num_elements(shapes[name]),
        first_limit=first_limit,
    )


def chunk_by_bytes(
    items: Iterable[T], limit: float, nbytes: Callable[[T], int] = attrgetter("nbytes")
) -> list[list[T]]:
    """Split items into chunks of adjacent items.

    A chunk has at most `limit` bytes; a larger item is a chunk of its own.
    """
    chunks: list[list[T]] = []
    size = 0
    for item in items:
        if not chunks or size + nbytes(item) > limit:
            chunks.append([])
            size = 0
        chunks[-1].append(item)
        size += nbytes(item)
    return chunks


def pipeline_gradient_buckets(
    gradients: Iterable[T], layout: Layout, nbytes: Callable[[T], int] = attrgetter("nbytes")
) -> list[list[T]]:
    """Return the buckets in which replicas of a pipeline rank sum their gradients at the end of a step (ddp)."""
    return chunk_by_bytes(gradients, int(layout.bucket_mb * MIB), nbytes)
