"""What is looked at before a node's word counts: that it is complete, of what the node may tell and no more, and of
numbers that a sane node would send."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from phalanx.cost.exact.swarm import encoded_bytes
from phalanx.spec.swarm import Codec
from phalanx.swarm.codec import decode
from phalanx.swarm.coordinator.ledger import AcceptedUpdate
from phalanx.swarm.pieces import ModelPiece
from phalanx.swarm.tensor_files import HEADER_BYTES, TensorFile, TensorFileError
from phalanx.swarm.update_files import Weights, sends_weights

HEADER_LIMIT, HEADER_OF_EACH = 2**16, 2**8
"""Bytes that a file may have beside its numbers: names and places of its tensors."""
BUSY = "busy"
"""Of an update while another of the node's comes: perhaps over a link that broke, and nobody has noticed yet."""
COMPARED_WITH = 3
"""So many updates must be known before one can be an outlier."""


class UpdateRejected(Exception):  # noqa: N818 - a verdict, not an error of ours
    """An update that does not count, and why."""


def size_limit(items: Sequence[ModelPiece], codec: Codec) -> int:
    """The most bytes that an update of these can have."""
    return HEADER_LIMIT + sum(HEADER_OF_EACH + encoded_bytes(item.numbers, codec) for item in items)


def check_update(
    path: Path, items: Sequence[ModelPiece], codec: Codec, base: Weights, norms: Sequence[float], outlier: float
) -> float:
    """How large the update in a file is: the norm of the change of all of it.

    Raises Refused for pieces that the node may not tell, or that are missing or of another size; for numbers that are
    not finite; for a change `outlier` times as large as the median of `norms`, those of the updates before.
    """
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(HEADER_BYTES), "little")
    if HEADER_LIMIT + HEADER_OF_EACH * len(items) < header_bytes <= path.stat().st_size:
        raise UpdateRejected(f"oversized: a header of {header_bytes} bytes")
    try:
        opened = TensorFile(path)
    except TensorFileError as error:
        raise UpdateRejected(f"malformed: {error}") from None
    with opened as file:
        return _norm(file, items, codec, base, norms, outlier)


def _norm(
    file: TensorFile, items: Sequence[ModelPiece], codec: Codec, base: Weights, norms: Sequence[float], outlier: float
) -> float:
    wanted, there = {item.key: (encoded_bytes(item.numbers, codec),) for item in items}, file.shapes
    if foreign := sorted(set(there) - set(wanted)):
        raise UpdateRejected(f"foreign: it tells of {foreign[0]}, which the node does not train")
    if missing := sorted(set(wanted) - set(there)):
        raise UpdateRejected(f"malformed: {missing[0]} is missing")
    if other := [key for key, shape in wanted.items() if there[key] != shape]:
        raise UpdateRejected(f"malformed: {other[0]} has {there[other[0]]} bytes and not {wanted[other[0]]}")
    norms_of_pieces = [torch.zeros((), dtype=torch.float64)]
    for item in items:
        value = decode(file.raw(item.key), item.shape, codec)
        change = value - base(item) if sends_weights(codec) else value
        size = torch.linalg.vector_norm(change)
        if not torch.isfinite(size):  # or so large that their squares are not
            raise UpdateRejected(f"not finite: numbers of {item.key}")
        norms_of_pieces.append(size.double())
    norm = float(torch.stack(norms_of_pieces).norm())
    if outlier and len(norms) >= COMPARED_WITH and norm > outlier * median(norms):
        raise UpdateRejected(f"outlying: a change of {norm:.3g}, where {median(norms):.3g} is usual")
    return norm


def find_outliers(told: Sequence[AcceptedUpdate], outlier: float) -> list[AcceptedUpdate]:
    """Of a round's updates, those `outlier` times as large as the median of all of them: who tells first is compared
    with nothing yet."""
    norms = [telling.norm for telling in told if telling.tokens]
    if not outlier or len(norms) < COMPARED_WITH:
        return []
    return [telling for telling in told if telling.norm > outlier * median(norms)]
