"""Checks for parameters and optimizers that cannot be sharded over ranks by rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from phalanx.parallel.module_tensors import named_parameters
from phalanx.spec.errors import UserError
from phalanx.spec.layout import SHARDED_STRATEGIES, Layout

UNSPLITTABLE: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "reruns the model inside its step, and treats all parameters as one vector",
    torch.optim.SparseAdam: "uses sparse gradients, whose rows cannot be sharded",
    torch.optim.Adafactor: "averages over rows and columns of full matrices",
    torch.optim.Rprop: "uses operations that PyTorch cannot shard",
}


def check_shardable_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise UserError for an optimizer of torch.optim that cannot step row shards of parameters.

    Element-wise optimizers can step shards. So can optimizers whose norms and products DTensor computes over ranks
    (LAMB, Muon)."""
    for optimizer in optimizers:
        for optimizer_class, reason in UNSPLITTABLE.items():
            if isinstance(optimizer, optimizer_class):
                problem = f"{reason}, so it cannot train parameters that ZeRO shards over ranks"
                fix = 'use an element-wise optimizer such as AdamW, or layout.data_parallel = "ddp"'
                raise UserError("optimizer", type(optimizer).__name__, problem, fix)


def steps_in_pieces(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether steps of some parameters at a time equal one step of all: not for an optimizer of the user.

    It may count its steps, or use a norm of all gradients."""
    is_ours = type(optimizer).__module__.startswith(("torch.optim.", "phalanx."))
    return is_ours and not isinstance(optimizer, tuple(UNSPLITTABLE))


def check_shardable_module(module: nn.Module, layout: Layout, blocks: Sequence[nn.Module] = ()) -> None:
    """Raise UserError for a parameter that cannot be sharded, or for a module that is its own block.

    Parameters are checked if the data-parallel strategy of the layout shards."""
    if any(block is module for block in blocks):
        raise UserError("blocks", type(module).__name__, "is the module itself", "pass its submodules, or none")
    for name, parameter in named_parameters(module) if layout.data_parallel in SHARDED_STRATEGIES else ():
        if parameter.ndim == 0:
            problem = f"cannot shard {name}, a scalar without rows"
            fix = "give it the shape [1]"
        elif not parameter.is_contiguous():
            problem = f"cannot shard {name}, whose rows are not contiguous in memory"
            fix = "make it contiguous()"
        else:
            continue
        fix = f'{fix}, or use layout.data_parallel = "ddp"'
        raise UserError("layout.data_parallel", layout.data_parallel, problem, fix)
