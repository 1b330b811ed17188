"""Muon: momentum, orthogonalised (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/)."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

# Quintic coefficients that raise small singular values fastest (same source).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


def orthogonalise(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Replace the singular values of each matrix [..., rows, columns] by about 1 (Newton-Schulz, five steps)."""
    a, b, c = COEFFICIENTS
    x = matrices.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """For matrices (and stacks of them, such as experts). Needs whole matrices: a sharded momentum is gathered for the
    step, and each rank keeps its part of the result; the state stays sharded."""

    def __init__(self, parameters: list[torch.nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            updates: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    updates[parameter.shape].append((parameter, self._momentum(parameter, group["momentum"])))
            for shape, pairs in updates.items():
                scale = group["lr"] * max(1.0, shape[-2] / shape[-1]) ** 0.5
                whole = torch.stack([u.full_tensor() if isinstance(u, DTensor) else u for _, u in pairs])
                for (parameter, _), update in zip(pairs, orthogonalise(whole, compute_dtype(whole)), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(scale * like(update.to(parameter.dtype), parameter))

    def _momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        """Nesterov momentum of the gradient."""
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        state["momentum"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(state["momentum"], momentum)


def compute_dtype(matrices: Tensor) -> torch.dtype:
    """bf16 is enough for the iteration (same source); proofs in fp64 keep fp64."""
    return torch.float64 if matrices.dtype == torch.float64 else torch.bfloat16


def like(full: Tensor, parameter: Tensor) -> Tensor:
    """`full` split as `parameter` is; every rank has all of it, so nothing is communicated."""
    if isinstance(parameter, DTensor):
        return distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return full
