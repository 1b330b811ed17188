"""What cannot be split over ranks by rows: some parameters, and some optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from phalanx.parallel.module_tensors import named_parameters
from phalanx.spec.errors import UserError
from phalanx.spec.layout import SHARDED_STRATEGIES, Layout

UNSPLITTABLE: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "runs the model again inside its step, and takes all parameters as one vector",
    torch.optim.SparseAdam: "takes sparse gradients, which have no rows to give to their owners",
    torch.optim.Adafactor: "averages over rows and columns of whole matrices",
    torch.optim.Rprop: "is written with operations that PyTorch cannot split",
}


def check_shardable_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise UserError for an optimizer of torch.optim that cannot step parameters of which a rank has some rows. Those
    that step each number by itself can, and those whose norms and products DTensor computes over ranks (LAMB, Muon)."""
    for optimizer in optimizers:
        for kind, reason in UNSPLITTABLE.items():
            if isinstance(optimizer, kind):
                problem = f"{reason}: it cannot train what ZeRO splits over ranks"
                fix = 'use one that steps every number by itself, such as AdamW, or layout.data_parallel = "ddp"'
                raise UserError("optimizer", type(optimizer).__name__, problem, fix=fix)


def check_shardable_module(module: nn.Module, layout: Layout, blocks: Sequence[nn.Module] = ()) -> None:
    """Raise UserError for a parameter whose rows cannot be given to ranks, or for a module that is its own block."""
    if any(block is module for block in blocks):
        raise UserError("blocks", type(module).__name__, "is the module itself", fix="name its parts, or none")
    for name, parameter in named_parameters(module) if layout.data_parallel in SHARDED_STRATEGIES else ():
        if parameter.ndim == 0:
            problem = f"{name} is a scalar and has no rows to split"
            fix = "give it the shape [1]"
        elif not parameter.is_contiguous():
            problem = f"the rows of {name} do not lie one after another"
            fix = "make it contiguous()"
        else:
            continue
        raise UserError(
            "layout.data_parallel", layout.data_parallel, problem, fix=f'{fix}, or use layout.data_parallel = "ddp"'
        )
