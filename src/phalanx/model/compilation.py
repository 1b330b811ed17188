"""Compilation of a transformer by torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import torch
import torch._functorch.config
from torch import Tensor, nn

from phalanx.model.mlp import MLP
from phalanx.model.moe import Experts
from phalanx.model.part import modules_declaring
from phalanx.model.products import compiled_activation
from phalanx.model.rotary import RotaryTable, apply_rotary
from phalanx.spec.parts.operations import AttentionCore


def compile_blocks(blocks: Iterable[nn.Module], whole: bool) -> None:
    """Compile blocks of a transformer in place.

    A `whole` block is compiled to one graph, which its collectives or split backward passes would break. Otherwise only
    rotary embeddings and activations are compiled: the elementwise functions that are not yet one kernel."""
    # By default the compiler saves what a matrix product of the backward pass reads, such as the output of a SwiGLU.
    # Its inputs are saved anyway, and eager blocks recompute it: `docs/design/decisions/recomputed-activations.md`.
    torch._functorch.config.ban_recompute_materialized_backward = False
    for block in blocks:
        if whole:
            block.compile()
            continue
        for module in modules_declaring(block, AttentionCore):
            module.rotate = _compile_rotary()
        for module in block.modules():
            if isinstance(module, MLP | Experts):
                module.activation = compiled_activation(module.activation)


@cache
def _compile_rotary() -> Callable[[Tensor, RotaryTable], Tensor]:
    return torch.compile(apply_rotary, dynamic=True)
