"""Initial weights as a pure function of seed, parameter name and row.

They do not depend on the layout, and a rank draws only its own rows.

Why: `docs/design/decisions/initial-weights.md`."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.model import carried_tensors, model_parameters

BLOCK_NUMBERS = 2**20
"""Approximate number of values that are drawn from one seed, in complete rows."""


@dataclass(frozen=True)
class DrawnWeights:
    """The initial weights of a model that is trained from scratch."""

    spec: ModelSpec
    seed: int

    def __call__(self, name: str, shape: torch.Size) -> Tensor:
        """Return a full parameter."""
        return initial_weight(self.spec, name, shape, self.seed)

    def draw(self, name: str, shape: torch.Size, rows: range) -> Tensor:
        """Return a parameter of the full shape with only the given rows initialized (`initial_weight`)."""
        return initial_weight(self.spec, name, shape, self.seed, rows)


def initial_weight(spec: ModelSpec, name: str, shape: torch.Size, seed: int, rows: range | None = None) -> Tensor:
    """Return the initial value of one parameter, fp32 on the CPU.

    Matrices are normal with std sqrt(2 / (5 D)) (Nguyen and Salazar, arXiv 1910.05895). Those that write into the
    residual stream are divided by sqrt(2 L) (GPT-2); S taps of a convolution have std 1 / sqrt(S), norms are 1, biases
    and sinks 0, rates of decay uniform up to 16, and steps from 0.001 to 0.1 (Mamba-2), as the parts declare. With
    `rows`, other rows are uninitialized and use no memory."""
    init = (model_parameters(spec).get(name) or carried_tensors(spec)[name]).init
    if init in ("zeros", "ones"):
        return torch.zeros(shape) if init == "zeros" else torch.ones(shape)
    std = shape[1] ** -0.5 if init == "taps" else math.sqrt(2 / (5 * spec.hidden_size))
    if init == "output":
        std /= math.sqrt(2 * spec.num_layers)
    full = torch.empty(shape)
    if init == "log_rates":  # Gated DeltaNet's released code, and transformers' Qwen3-Next
        return full.uniform_(0.01, 16, generator=named_generator(seed, name)).log_()
    if init == "step_bias":  # softplus of it is log-uniform (https://github.com/state-spaces/mamba)
        step = full.uniform_(math.log(0.001), math.log(0.1), generator=named_generator(seed, name)).exp_()
        return step + torch.log(-torch.expm1(-step))
    rows = range(shape[0]) if rows is None else rows
    block_rows = max(1, BLOCK_NUMBERS // math.prod(shape[1:]))
    for block in range(rows.start // block_rows, -(-rows.stop // block_rows) if rows else 0):
        begin = block * block_rows
        full[begin : begin + block_rows].normal_(0, std, generator=named_generator(seed, name, block))
    return full


def named_generator(seed: int, name: str, block: int = 0) -> torch.Generator:
    """Return a CPU generator that depends on its arguments only.

    Ranks draw the blocks of a name's values independently."""
    # torch's CPU generator uses 32 bits of a seed, so seed, name and block must share them.
    return torch.Generator().manual_seed((zlib.crc32(f"{seed} {name}".encode()) + block) % 2**32)
