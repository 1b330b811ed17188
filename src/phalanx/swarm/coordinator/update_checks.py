"""Checks of a received update: completeness, permitted pieces, and plausible values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from phalanx.cost.exact.swarm import encoded_bytes
from phalanx.runs.decode import MAX_NUMBER
from phalanx.spec.run import RunSpec
from phalanx.spec.swarm import Codec
from phalanx.swarm.codec import decode
from phalanx.swarm.coordinator.open_round import AcceptedUpdate
from phalanx.swarm.pieces import ModelPiece
from phalanx.swarm.tensor_files import HEADER_BYTES, TensorFile, TensorFileError
from phalanx.swarm.update_files import Weights, sends_weights

BASE_HEADER_BYTES = 2**16
HEADER_BYTES_PER_PIECE = 2**8
"""Maximum size of a file's header: names and positions of its tensors."""
BUSY = "busy"
"""Reason to reject an update while another of the node is received, perhaps over a failed link."""
MIN_RECENT_NORMS = 3
"""Number of updates that must be known before one can be an outlier."""


class UpdateRejected(Exception):  # noqa: N818 - a verdict, not an error
    """A rejected update, with the reason."""


def size_limit(pieces: Sequence[ModelPiece], codec: Codec) -> int:
    """Return the maximum number of bytes of an update with these pieces."""
    sizes = (HEADER_BYTES_PER_PIECE + encoded_bytes(piece.num_elements, codec) for piece in pieces)
    return BASE_HEADER_BYTES + sum(sizes)


def check_counts(run: RunSpec, tokens: int, steps: int, assigned_steps: int) -> None:
    """Raise UpdateRejected if a node cannot have trained so much in a round.

    `assigned_steps` is the number of steps of text that the node may read in the round.
    """
    # Without tokens: a gradient that was not finite, or steps whose targets are all ignored.
    if not (0 < steps <= assigned_steps and 0 <= tokens <= steps * run.training.tokens_per_step):
        raise UpdateRejected(f"malformed: {steps} of {assigned_steps} steps, or an impossible number of tokens")


def check_update(
    path: Path,
    pieces: Sequence[ModelPiece],
    codec: Codec,
    base: Weights,
    recent_norms: Sequence[float],
    outlier_factor: float,
) -> float:
    """Return the norm of the change in an update.

    An update is an outlier from `outlier_factor` times the median of `recent_norms`; 0 for no check. Raises
    UpdateRejected if a piece is not permitted, missing or of a wrong size, a value is not finite, or the update is an
    outlier.
    """
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(HEADER_BYTES), "little")
    if BASE_HEADER_BYTES + HEADER_BYTES_PER_PIECE * len(pieces) < header_bytes <= path.stat().st_size:
        raise UpdateRejected(f"oversized: a header of {header_bytes} bytes")
    try:
        opened = TensorFile(path)
    except TensorFileError as error:
        raise UpdateRejected(f"malformed: {error}") from None
    with opened as file:
        expected_shapes = {piece.key: (encoded_bytes(piece.num_elements, codec),) for piece in pieces}
        shapes = file.shapes
        if foreign := sorted(set(shapes) - set(expected_shapes)):
            raise UpdateRejected(f"foreign: it contains {foreign[0]}, which the node does not train")
        if missing := sorted(set(expected_shapes) - set(shapes)):
            raise UpdateRejected(f"malformed: {missing[0]} is missing")
        if mismatched := [key for key, shape in expected_shapes.items() if shapes[key] != shape]:
            sizes = f"{shapes[mismatched[0]]} bytes instead of {expected_shapes[mismatched[0]]}"
            raise UpdateRejected(f"malformed: {mismatched[0]} has {sizes}")
        piece_norms = [torch.zeros((), dtype=torch.float64)]
        for piece in pieces:
            value = decode(file.raw(piece.key), piece.shape, codec)
            change = value - base(piece) if sends_weights(codec) else value
            piece_norm = torch.linalg.vector_norm(change)
            # The values may also be too large for a finite square.
            if not torch.isfinite(piece_norm):
                raise UpdateRejected(f"not finite: values of {piece.key}")
            piece_norms.append(piece_norm.double())
    norm = float(torch.stack(piece_norms).norm())
    if norm > MAX_NUMBER:
        raise UpdateRejected(f"not finite: a change of {norm:.3g} exceeds the maximum of {MAX_NUMBER:.3g}")
    if outlier_factor and len(recent_norms) >= MIN_RECENT_NORMS and norm > outlier_factor * median(recent_norms):
        raise UpdateRejected(f"outlying: a change of {norm:.3g}, compared with a median of {median(recent_norms):.3g}")
    return norm


def find_outliers(updates: Sequence[AcceptedUpdate], outlier_factor: float) -> list[AcceptedUpdate]:
    """Return the updates of a round that are outliers relative to the median of all of them.

    The first updates of a swarm can be compared with no earlier ones.
    """
    norms = [update.norm for update in updates if update.tokens]
    if not outlier_factor or len(norms) < MIN_RECENT_NORMS:
        return []
    return [update for update in updates if update.norm > outlier_factor * median(norms)]
