"""What a node tells of a round, as a file: the pieces that it trained, coded.

In fp32 they are the weights themselves, so that nothing is rounded. In fewer bits they are what changed since the round
began, together with what coding left out of the rounds before (error feedback; Seide et al., Interspeech 2014). Where
nodes tell gradients (ddp), these are what changed since nothing."""

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
"""The present value of a piece."""
Feedback = dict[str, Tensor]
"""What coding left out so far, by piece."""


def sends_weights(codec: Codec) -> bool:
    """Whether weights are sent, and not what changed."""
    return codec == "fp32"


def update_base(swarm: SwarmSpec, base: Weights) -> Weights:
    """What a node tells changes of: the values that the round began with; zero, where it tells gradients."""
    return (lambda piece: torch.zeros(piece.shape)) if swarm.sends_gradients else base


def write_update(
    path: Path, pieces: Sequence[ModelPiece], codec: Codec, weights: Weights, base: Weights, feedback: Feedback
) -> TensorFile:
    """Write the pieces to a file. `base` are the values that the round began with; `feedback` is kept up."""
    shapes = {piece.key: (encoded_bytes(piece.num_elements, codec),) for piece in pieces}
    file = TensorFile.recreate(path, shapes, "U8")
    for piece in pieces:
        file.write_raw(piece.key, encode_piece(piece, codec, weights, base=base, feedback=feedback))
    return file


def encode_piece(piece: ModelPiece, codec: Codec, weights: Weights, base: Weights, feedback: Feedback) -> Buffer:
    """One piece, coded."""
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
    """The value of a piece that somebody told. Raises CodecError for what is none."""
    value = decode(data, piece.shape, codec)
    return value if sends_weights(codec) else base(piece) + value
