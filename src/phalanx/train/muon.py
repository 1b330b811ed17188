"""Muon: momentum, orthogonalised (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/)."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

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
    """For matrices (and stacks of them, such as experts). It needs whole ones, and state that is split by rows stays
    so: a rank gathers an N-th of the matrices, orthogonalises these, and gives every rank its rows of the result.
    Stacks are split between their matrices, and nothing is sent for them."""

    def __init__(self, parameters: list[torch.nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.shape].append(parameter)
            for shape, parameters in alike.items():
                scale = group["lr"] * max(1.0, shape[-2] / shape[-1]) ** 0.5
                updates = orthogonal_rows([self._momentum(p, group["momentum"]) for p in parameters])
                for parameter, update in zip(parameters, updates, strict=True):
                    rows = local(parameter)
                    rows.mul_(1 - group["lr"] * group["weight_decay"])
                    rows.sub_(scale * update.to(rows.dtype))

    def _momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        """Nesterov momentum of the gradient."""
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        state["momentum"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(state["momentum"], momentum)


def orthogonal_rows(alike: list[Tensor]) -> list[Tensor]:
    """This rank's rows of the orthogonalised matrices, all of one shape."""
    dtype = compute_dtype(alike[0])
    rows = torch.stack([local(matrix).to(dtype) for matrix in alike])
    if not isinstance(alike[0], DTensor) or alike[0].ndim > 2:
        return list(orthogonalise(rows, dtype))
    (axis,) = [axis for axis, placement in enumerate(alike[0].placements) if placement == Shard(0)]
    group = alike[0].device_mesh.get_group(axis)
    return list(give_rows(orthogonalise(gather_mine(rows, alike[0].shape[0], group), dtype), len(alike), group))


def gather_mine(rows: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
    """Of M matrices [M, this rank's rows, columns], whole [., total, columns] those that fall to this rank: i, i + N,
    and so on. Sends (N - 1)/N of what this rank holds."""
    ranks, rank, columns = group.size(), group.rank(), rows.shape[2]
    mine = len(range(rank, len(rows), ranks))
    sent = torch.cat([rows[owner::ranks].flatten() for owner in range(ranks)])
    sizes = [mine * count * columns for count in rows_of_ranks(total, ranks)]
    received = sent.new_empty(sum(sizes))
    sent_sizes = [len(range(owner, len(rows), ranks)) * rows[0].numel() for owner in range(ranks)]
    dist.all_to_all_single(received, sent, sizes, sent_sizes, group=group)
    parts = zip(received.split(sizes), rows_of_ranks(total, ranks), strict=True)
    return torch.cat([part.view(mine, count, columns) for part, count in parts], dim=1)


def give_rows(mine: Tensor, matrices: int, group: dist.ProcessGroup) -> Tensor:
    """The way back: every rank's rows of all matrices [M, rows, columns]."""
    ranks, rank, (total, columns) = group.size(), group.rank(), mine.shape[1:]
    counts = rows_of_ranks(total, ranks)
    sent = torch.cat([part.flatten() for part in mine.split(counts, dim=1)])
    held = [len(range(owner, matrices, ranks)) for owner in range(ranks)]
    sizes = [count * counts[rank] * columns for count in held]
    received = sent.new_empty(sum(sizes))
    dist.all_to_all_single(received, sent, sizes, [len(mine) * count * columns for count in counts], group=group)
    rows = mine.new_empty(matrices, counts[rank], columns)
    for owner, part in enumerate(received.split(sizes)):
        rows[owner::ranks] = part.view(-1, counts[rank], columns)
    return rows


def rows_of_ranks(total: int, ranks: int) -> list[int]:
    """Rows of each rank as Shard(0) splits them: the first as many as it takes, the last maybe fewer or none."""
    each = -(-total // ranks)
    return [max(0, min(each, total - rank * each)) for rank in range(ranks)]


def compute_dtype(matrices: Tensor) -> torch.dtype:
    """bf16 is enough for the iteration (same source); proofs in fp64 keep fp64."""
    return torch.float64 if matrices.dtype == torch.float64 else torch.bfloat16


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
