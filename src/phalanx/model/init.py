"""Initial weights as a pure function of seed, parameter name and row: no layout can change them, and a rank draws its
own rows only."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.spec.model import ModelSpec

RESIDUAL_OUTPUTS = ("attention.wo.weight", "mlp.down.weight", "experts.down", "shared.down.weight")


BLOCK_NUMBERS = 2**20
"""About so many numbers of a matrix are drawn from one seed, in whole rows."""


@dataclass(frozen=True)
class DrawnWeights:
    """The initial weights of a model that starts from nothing."""

    spec: ModelSpec
    seed: int

    def __call__(self, name: str, shape: torch.Size) -> Tensor:
        """Return a whole parameter."""
        return initial_weight(self.spec, name, shape, seed=self.seed)

    def draw(self, name: str, shape: torch.Size, rows: range) -> Tensor:
        """Return a parameter of which only some rows are wanted: see `initial_weight`."""
        return initial_weight(self.spec, name, shape, seed=self.seed, rows=rows)


def initial_weight(spec: ModelSpec, name: str, shape: torch.Size, seed: int, rows: range | None = None) -> Tensor:
    """Return the initial value of one parameter, fp32 on the CPU. Where only some `rows` of a matrix are wanted, the
    others are not written: they have no meaning, and take no memory.

    Matrices are normal with std sqrt(2 / (5 D)) (Nguyen and Salazar, arXiv 1910.05895), those that write into
    the residual stream divided by sqrt(2 L) (GPT-2); norms are 1, biases 0.
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    std = math.sqrt(2 / (5 * spec.hidden_size))
    if name.endswith(RESIDUAL_OUTPUTS):
        std /= math.sqrt(2 * spec.num_layers)
    full, rows = torch.empty(shape), range(shape[0]) if rows is None else rows
    block_rows = max(1, BLOCK_NUMBERS // math.prod(shape[1:]))
    for block in range(rows.start // block_rows, -(-rows.stop // block_rows) if rows else 0):
        begin = block * block_rows
        full[begin : begin + block_rows].normal_(0, std, generator=named_generator(seed, name, block))
    return full


def named_generator(seed: int, name: str, block: int = 0) -> torch.Generator:
    """Return what draws for a part of a name, on the CPU: the same wherever it is asked for."""
    # Of a seed torch's CPU generator takes 32 bits, so seed, name and block must share them.
    return torch.Generator().manual_seed((zlib.crc32(f"{seed} {name}".encode()) + block) % 2**32)
