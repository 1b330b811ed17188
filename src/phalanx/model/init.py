"""Initial weights as a pure function of seed and parameter name, so that no layout can change them."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from phalanx.spec.model import ModelSpec

RESIDUAL_OUTPUTS = ("attention.wo.weight", "mlp.down.weight", "experts.down", "shared.down.weight")


def initial_weight(spec: ModelSpec, name: str, shape: torch.Size, seed: int) -> Tensor:
    """The initial value of one parameter, fp32 on the CPU.

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
    return torch.empty(shape).normal_(0, std, generator=named_generator(seed, name))


def named_generator(seed: int, name: str) -> torch.Generator:
    """What draws for a name, on the CPU: the same wherever it is asked for."""
    # Of a seed torch's CPU generator takes 32 bits, so seed and name must share them.
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
