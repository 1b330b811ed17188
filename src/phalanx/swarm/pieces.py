"""Pieces of a model that nodes exchange: rows of a shared tensor, or one expert's part of a tensor.

No torch. Names are those of `parameter_shapes`. An expert's piece has its number, "blocks.0.mlp.experts.up[3]"; a part
of a large tensor has its first row, "embedding.weight[4096:]". A piece is the unit that is in memory at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from phalanx.spec.model import ModelSpec
from phalanx.spec.parameter_shapes import parameter_shapes
from phalanx.spec.parts.operations import Shape
from phalanx.spec.run import RunSpec
from phalanx.swarm.expert_ownership import Owners

MAX_PIECE_ELEMENTS = 2**18
"""Maximum number of elements of a part of a tensor, unless one row has more."""
STACKED_EXPERTS_INFIX = ".experts."
"""Infix in the names of tensors that stack a layer's experts."""


@dataclass(frozen=True)
class ModelPiece:
    """A piece of a model."""

    name: str
    """The name of the parameter."""
    shape: Shape
    expert: int | None = None
    first_row: int | None = None
    """The first row of a part of a tensor."""

    @property
    def key(self) -> str:
        """The unique name of the piece."""
        if self.first_row is not None:
            return f"{self.name}[{self.first_row}:]"
        return self.name if self.expert is None else f"{self.name}[{self.expert}]"

    @property
    def num_elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def layer(self) -> int | None:
        """The layer of the piece's block, or None outside of blocks."""
        prefix, _, suffix = self.name.partition(".")
        return int(suffix.partition(".")[0]) if prefix == "blocks" else None


@lru_cache
def model_pieces(model: ModelSpec) -> tuple[ModelPiece, ...]:
    """Return all pieces of a model, in the order of its parameters."""
    pieces: list[ModelPiece] = []
    for name, shape in parameter_shapes(model).items():
        if STACKED_EXPERTS_INFIX in name:
            pieces += [ModelPiece(name, shape[1:], expert) for expert in range(shape[0])]
        else:
            rows = shape[0]
            rows_per_piece = max(1, MAX_PIECE_ELEMENTS // math.prod(shape[1:]))
            if rows <= rows_per_piece:
                pieces.append(ModelPiece(name, shape))
                continue
            for first_row in range(0, rows, rows_per_piece):
                part_shape = (min(rows_per_piece, rows - first_row), *shape[1:])
                pieces.append(ModelPiece(name, part_shape, first_row=first_row))
    return tuple(pieces)


def fragment_index(piece: ModelPiece, num_fragments: int) -> int:
    """Return the fragment of a piece: fragments are synchronized in turn.

    Blocks belong to fragments in strides (Streaming DiLoCo, arXiv 2501.18512, section 2.2). Parameters outside of
    blocks belong to the first fragment.
    """
    return 0 if piece.layer is None else piece.layer % num_fragments


def fragment_pieces(model: ModelSpec, fragment: int, num_fragments: int) -> tuple[ModelPiece, ...]:
    """Return the pieces of a fragment."""
    return tuple(piece for piece in model_pieces(model) if fragment_index(piece, num_fragments) == fragment)


def round_pieces(run: RunSpec, round_number: int) -> tuple[ModelPiece, ...]:
    """Return the pieces that a round of a swarm exchanges: those of one fragment, in turn."""
    assert run.swarm is not None
    return fragment_pieces(run.model, round_number % run.swarm.fragments, run.swarm.fragments)


def pieces_sent_by(pieces: tuple[ModelPiece, ...], owners: Owners | None, node: str) -> tuple[ModelPiece, ...]:
    """Return the pieces that a node trains and sends: shared pieces, and those of its experts.

    Without owners each node trains all experts.
    """
    if owners is None:
        return pieces
    return tuple(piece for piece in pieces if piece.expert is None or node in owners[piece.expert])
