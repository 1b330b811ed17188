"""Equality of blocks, which decides which blocks are traced."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from phalanx.model.transformer import Block
from phalanx.parallel.mesh import build_mesh
from phalanx.spec.files.load import run_from_table
from phalanx.train.learner import Learner
from phalanx.verify.repeated_blocks import RepeatedBlocks

NUM_BLOCKS = 12


def scale_output(factor: float, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return forward(x) * factor


def scale_by_partial(part: nn.Module, factor: float) -> None:
    part.forward = partial(scale_output, factor, part.forward)


def scale_by_closure(part: nn.Module, factor: float) -> None:
    forward = part.forward
    part.forward = lambda x: forward(x) * factor


class Scale:
    """Change of a module that has a reference to the module."""

    def __init__(self, part: nn.Module, factor: float) -> None:
        self.forward: Callable[[Tensor], Tensor] = part.forward
        part.forward = self.double if factor == 2.0 else self.triple

    def double(self, x: Tensor) -> Tensor:
        return self.forward(x) * 2

    def triple(self, x: Tensor) -> Tensor:
        return self.forward(x) * 3


def scale_by_hook(part: nn.Module, factor: float) -> None:
    part.register_forward_hook(lambda _, inputs, output: output * factor)


@pytest.mark.parametrize("scale", [scale_by_partial, scale_by_closure, Scale, scale_by_hook])
def test_blocks_are_equal_if_the_replaced_methods_of_their_submodules_are(
    scale: Callable[[nn.Module, float], object],
) -> None:
    assert num_repeated(lambda _, norm: scale(norm, 2.0)) == num_repeated(lambda *_: None) == NUM_BLOCKS - 4
    assert num_repeated(lambda index, norm: scale(norm, 2.0 + index // 6)) == 2 * (NUM_BLOCKS // 2 - 4)
    assert num_repeated(lambda index, norm: scale(norm, 2.0) if index % 2 else None) == 2 * (NUM_BLOCKS // 2 - 4)


def num_repeated(change: Callable[[int, nn.Module], object]) -> int:
    """Return the number of blocks that repeat others after a change of each block's norm, given the block's index."""
    sizes = {"num_layers": NUM_BLOCKS, "hidden_size": 8, "num_heads": 1, "ffn_hidden_size": 8, "vocab_size": 16}
    training = {"seq_len": 8, "tokens_per_step": 8, "compile": False}
    run = run_from_table({"model": {**sizes, "max_seq_len": 8}, "training": training})
    learner = Learner(run, build_mesh(run.layout, 1, "cpu"), torch.device("cpu"))
    for index, block in enumerate(cast(Iterable[Block], learner.module.blocks)):
        change(index, block.mlp_norm)
    return RepeatedBlocks(learner).num_repeated
