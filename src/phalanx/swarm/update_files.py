"""Update of a node as a file: the encoded pieces that it trained.

With fp32, an update contains the weights themselves, without rounding. With fewer bits, it contains the changes since
the round began, plus the encoding errors of earlier rounds (error feedback; Seide et al., Interspeech 2014). Gradients
(ddp) are changes relative to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from phalanx.cost.exact.swarm import encoded_bytes
from phalanx.spec.swarm import Codec, SwarmSpec
from phalanx.swarm.codec import Buffer, decode, encode
from phalanx.swarm.pieces import ModelPiece
from phalanx.swarm.tensor_files import TensorFile

Weights = Callable[[ModelPiece], Tensor]
"""A function that returns the present value of a piece."""
Feedback = dict[str, Tensor]
"""Accumulated encoding errors by piece."""


def sends_weights(codec: Codec) -> bool:
    """Return whether updates contain weights instead of changes."""
    return codec == "fp32"


def update_base(swarm: SwarmSpec, base: Weights) -> Weights:
    """Return the reference of a node's changes: the values before the round, or zero for gradients."""
    return (lambda piece: torch.zeros(piece.shape)) if swarm.sends_gradients else base


def write_update(
    path: Path, pieces: Sequence[ModelPiece], codec: Codec, weights: Weights, base: Weights, feedback: Feedback
) -> TensorFile:
    """Write the pieces to a file.

    `base` returns the values before the round. `feedback` holds the encoding errors, which this updates.
    """
    shapes = {piece.key: (encoded_bytes(piece.num_elements, codec),) for piece in pieces}
    file = TensorFile.recreate(path, shapes, "U8")
    for piece in pieces:
        file.write_raw(piece.key, encode_piece(piece, codec, weights, base, feedback))
    return file


def encode_piece(piece: ModelPiece, codec: Codec, weights: Weights, base: Weights, feedback: Feedback) -> Buffer:
    """Return the encoded piece, and update its encoding error."""
    value = weights(piece).detach().float()
    if sends_weights(codec):
        return encode(value, codec)
    change = value - base(piece)
    if piece.key in feedback:
        change += feedback[piece.key]
    data = encode(change, codec)
    feedback[piece.key] = change - decode(data, piece.shape, codec)
    return data


def decode_piece(piece: ModelPiece, data: Buffer, codec: Codec, base: Weights) -> Tensor:
    """Return the value of a received piece; raise CodecError if the number of bytes is wrong."""
    value = decode(data, piece.shape, codec)
    return value if sends_weights(codec) else base(piece) + value
