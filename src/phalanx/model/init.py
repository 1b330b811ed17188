"""Initial weights by parameter name, of which a rank draws or reads its part only.

Drawn ones are a pure function of seed, name and row, so they do not depend on the layout.

Why: `docs/design/decisions/initial-weights.md`."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.model.nf4 import dequantize, numbers_of_bytes, quantize, shape_of_numbers
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.model import carried_tensors, model_parameters
from phalanx.spec.tuning import MAGNITUDE_SUFFIX, is_adapter_parameter

BLOCK_NUMBERS = 2**20
"""Approximate number of values that are drawn from one seed, in complete rows."""


Weights = Callable[[str, torch.Size], Tensor]
"""Function that returns the value of a full parameter, by its name and shape."""
Part = tuple[slice, ...]
"""Range of each axis of a parameter."""


class PartialWeights:
    """Initial weights that exist elsewhere, such as in a file. `part` returns a part of a parameter."""

    def __init__(self, part: Callable[[str, torch.Size, Part], Tensor], names: Collection[str] = ()) -> None:
        self.part = part
        self.names = names
        """Names of parameters that are known to exist."""

    def __call__(self, name: str, shape: torch.Size) -> Tensor:
        """Return a full parameter."""
        return self.part(name, shape, tuple(slice(0, size) for size in shape))


@dataclass(frozen=True)
class DrawnWeights:
    """The initial weights of a model that is trained from scratch."""

    spec: ModelSpec
    seed: int

    def __call__(self, name: str, shape: torch.Size) -> Tensor:
        """Return a full parameter."""
        return self.part(name, shape, tuple(slice(0, size) for size in shape))

    def part(self, name: str, shape: torch.Size, part: Part) -> Tensor:
        """Return a part of a parameter, of which only the rows are drawn (`initial_weight`)."""
        if self.has_row_norms(name):
            return row_norms(self.spec, self, name, part)
        rows = range(part[0].start, part[0].stop) if len(shape) > 1 else None
        return initial_weight(self.spec, name, shape, self.seed, rows)[part]

    def has_row_norms(self, name: str) -> bool:
        """Return whether a parameter has the norms of the rows of another one."""
        return name in model_parameters(self.spec) and model_parameters(self.spec)[name].init == "row_norms"


def part_of_weight(weights: Weights, name: str, shape: torch.Size, part: Part) -> Tensor:
    """Return a part of a parameter; the other parts are neither drawn nor read if the weights permit it."""
    if isinstance(weights, PartialWeights | DrawnWeights):
        return weights.part(name, shape, part)
    return weights(name, shape)[part]


def quantized_part(weights: Weights, name: str, shape: torch.Size, part: Part) -> Tensor:
    """Return the bytes of a part of a parameter, of which `shape` and `part` count bytes."""
    columns = slice(numbers_of_bytes(part[-1].start), numbers_of_bytes(part[-1].stop))
    return quantize(part_of_weight(weights, name, shape_of_numbers(shape), (*part[:-1], columns)))


def with_adapter(weights: Weights, adapter: Weights) -> PartialWeights:
    """Return the weights of a model, with those of adapters from elsewhere, and what is trained with these."""
    names = adapter.names if isinstance(adapter, PartialWeights) else ()

    def part_of(name: str, shape: torch.Size, part: Part) -> Tensor:
        is_adapted = is_adapter_parameter(name) or name in names
        if is_adapted and isinstance(adapter, DrawnWeights) and adapter.has_row_norms(name):
            return row_norms(adapter.spec, weights, name, part)
        return part_of_weight(adapter if is_adapted else weights, name, shape, part)

    return PartialWeights(part_of)


def row_norms(spec: ModelSpec, weights: Weights, name: str, part: Part) -> Tensor:
    """Return the norms of some rows of the matrix whose magnitudes a parameter has, in fp64."""
    matrix = name.replace(MAGNITUDE_SUFFIX, "")
    parameter = model_parameters(spec)[matrix]
    shape = torch.Size(parameter.shape)
    rows = part_of_weight(weights, matrix, shape, (*part, slice(0, shape[1])))
    if parameter.is_quantized:
        rows = dequantize(quantize(rows), torch.float32)
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)


def initial_weight(spec: ModelSpec, name: str, shape: torch.Size, seed: int, rows: range | None = None) -> Tensor:
    """Return the initial value of one parameter, fp32 on the CPU.

    Matrices are normal with std sqrt(2 / (5 D)) (Nguyen and Salazar, arXiv 1910.05895). Those that write into the
    residual stream are divided by sqrt(2 L) (GPT-2); S taps of a convolution have std 1 / sqrt(S), norms are 1, biases
    and sinks 0, rates of decay uniform up to 16, and steps from 0.001 to 0.1 (Mamba-2), as the parts declare. With
    `rows`, other rows are uninitialized and use no memory."""
    init = (model_parameters(spec).get(name) or carried_tensors(spec)[name]).init
    if isinstance(init, float):
        return torch.full(shape, init)
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
    bound = shape[-1] ** -0.5
    rows = range(shape[0]) if rows is None else rows
    block_rows = max(1, BLOCK_NUMBERS // math.prod(shape[1:]))
    for block in range(rows.start // block_rows, -(-rows.stop // block_rows) if rows else 0):
        begin = block * block_rows
        generator = named_generator(seed, name, block)
        rows_of_block = full[begin : begin + block_rows]
        if init == "fan_in":  # Kaiming, with a = sqrt(5), as in peft
            rows_of_block.uniform_(-bound, bound, generator=generator)
        else:
            rows_of_block.normal_(0, std, generator=generator)
    return full


def named_generator(seed: int, name: str, block: int = 0) -> torch.Generator:
    """Return a CPU generator that depends on its arguments only.

    Ranks draw the blocks of a name's values independently."""
    # torch's CPU generator uses 32 bits of a seed, so seed, name and block must share them.
    return torch.Generator().manual_seed((zlib.crc32(f"{seed} {name}".encode()) + block) % 2**32)
