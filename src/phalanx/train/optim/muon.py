"""Muon: orthogonalized momentum (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

Why: `docs/design/decisions/muon-shared.md`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from phalanx.parallel.comm.collectives import to_group_device
from phalanx.parallel.dtensor_shards import local_tensor, rows_per_rank

# Quintic coefficients that raise small singular values fastest (same source).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


def orthogonalize(matrices: Tensor) -> Tensor:
    """Replace the singular values of matrices [..., rows, columns] by about 1 (Newton-Schulz, five steps).

    On CPUs bf16 is computed in fp32, which all CPUs support, and one matrix at a time. oneDNN's batched products depend
    on the number of matrices in the batch (AVX512-BF16), which is smaller with offload."""
    if matrices.device.type != "cpu":
        return _newton_schulz(matrices)
    dtype = torch.promote_types(matrices.dtype, torch.float32)
    result = matrices.new_empty(matrices.shape)
    stack_shape = -1, *matrices.shape[-2:]
    for matrix, orthogonal in zip(matrices.reshape(stack_shape), result.view(stack_shape), strict=True):
        orthogonal.copy_(_newton_schulz(matrix.to(dtype)))
    return result


def _newton_schulz(x: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


@dataclass(frozen=True)
class MatrixSharding:
    """Sharding of matrices over ranks along rows (-2) or columns (-1), of which a full matrix has `total`."""

    axis: int
    group: dist.ProcessGroup
    total: int


class Muon(torch.optim.Optimizer):
    """Muon for matrices, and stacks of them such as experts.

    It needs full matrices, but sharded state stays sharded. A rank gathers an N-th of the matrices, orthogonalizes
    them, and sends every rank its part of the result. Stacks that are sharded between their matrices need no
    communication."""

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        lr: float,
        momentum: float,
        weight_decay: float,
        global_matrices: Sequence[Tensor] = (),
    ) -> None:
        """Create the optimizer.

        `global_matrices` are the parameters as DTensors of full matrices, where they are not DTensors themselves."""
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        pairs = zip(parameters, global_matrices or parameters, strict=True)
        self.matrix_layouts = {parameter: (matrix.shape, matrix_shardings(matrix)) for parameter, matrix in pairs}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters with a gradient."""
        for group in self.param_groups:
            groups: dict[tuple[torch.Size, tuple[MatrixSharding, ...]], list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    groups[self.matrix_layouts[parameter]].append(parameter)
            for (shape, shardings), parameters in groups.items():
                scale = group["lr"] * max(1.0, shape[-2] / shape[-1]) ** 0.5
                updates = orthogonal_parts(
                    [local_tensor(self._update_momentum(p, group["momentum"])) for p in parameters], shardings
                )
                for parameter, update in zip(parameters, updates, strict=True):
                    local = local_tensor(parameter)
                    local.mul_(1 - group["lr"] * group["weight_decay"])
                    local.sub_(scale * update.to(local.device, local.dtype))

    def _update_momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        """Return the Nesterov momentum of the gradient."""
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        state["momentum"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(state["momentum"], momentum)


def matrix_shardings(matrix: Tensor) -> tuple[MatrixSharding, ...]:
    """Return the shardings of a matrix over ranks, the last one first."""
    if not isinstance(matrix, DTensor):
        return ()
    shardings = []
    shape = list(matrix.shape)
    for axis, placement in enumerate(matrix.placements):
        if isinstance(placement, Shard):
            group = matrix.device_mesh.get_group(axis)
            shardings.append(MatrixSharding(placement.dim - matrix.ndim, group, shape[placement.dim]))
            shape[placement.dim] = rows_per_rank(shape[placement.dim], group.size())[group.rank()]
    # Other axes distribute whole matrices of a stack, which needs no communication.
    return tuple(sharding for sharding in reversed(shardings) if sharding.axis >= -2)


def orthogonal_parts(matrices: list[Tensor], shardings: Sequence[MatrixSharding]) -> list[Tensor]:
    """Return this rank's parts of the orthogonalized matrices, which all have one shape."""
    dtype = exchange_dtype(matrices[0])
    stacked = torch.stack([matrix.to(dtype) for matrix in matrices])
    for sharding in shardings:
        stacked = to_group_device(stacked, sharding.group)
    return list(_orthogonalize_sharded(stacked.flatten(0, -3), shardings).view(stacked.shape))


def _orthogonalize_sharded(shards: Tensor, shardings: Sequence[MatrixSharding]) -> Tensor:
    """Orthogonalize matrices [M, rows, columns]; the order of rows or columns is irrelevant."""
    if not shardings or not len(shards):
        return orthogonalize(shards)
    (sharding, *remaining) = shardings
    columns = shardings[0].axis == -1
    gathered = gather_assigned(shards.mT if columns else shards, sharding.total, sharding.group)
    result = _orthogonalize_sharded(gathered.mT if columns else gathered, remaining)
    local = scatter_back(result.mT if columns else result, len(shards), sharding.group)
    return local.mT.contiguous() if columns else local


def gather_assigned(rows: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
    """Gather the full matrices that are assigned to this rank (i, i + N, and so on), [matrices, total, columns].

    `rows` are this rank's rows of M matrices, [M, rows, columns]; a full matrix has `total` rows. Sends (N - 1)/N of
    the local rows."""
    ranks = group.size()
    rank = group.rank()
    columns = rows.shape[2]
    num_assigned = len(range(rank, len(rows), ranks))
    sent = torch.cat([rows[owner::ranks].flatten() for owner in range(ranks)])
    sizes = [num_assigned * count * columns for count in rows_per_rank(total, ranks)]
    received = sent.new_empty(sum(sizes))
    sent_sizes = [len(range(owner, len(rows), ranks)) * rows[0].numel() for owner in range(ranks)]
    dist.all_to_all_single(received, sent, sizes, sent_sizes, group=group)
    shards = zip(received.split(sizes), rows_per_rank(total, ranks), strict=True)
    return torch.cat([shard.view(num_assigned, count, columns) for shard, count in shards], dim=1)


def scatter_back(assigned: Tensor, matrices: int, group: dist.ProcessGroup) -> Tensor:
    """Reverse of `gather_assigned`: return this rank's rows of all M matrices, [M, rows, columns]."""
    ranks = group.size()
    rank = group.rank()
    (total, columns) = assigned.shape[1:]
    counts = rows_per_rank(total, ranks)
    sent = torch.cat([shard.flatten() for shard in assigned.split(counts, dim=1)])
    owner_counts = [len(range(owner, matrices, ranks)) for owner in range(ranks)]
    sizes = [count * counts[rank] * columns for count in owner_counts]
    received = sent.new_empty(sum(sizes))
    dist.all_to_all_single(received, sent, sizes, [len(assigned) * count * columns for count in counts], group=group)
    rows = assigned.new_empty(matrices, counts[rank], columns)
    for owner, owned in enumerate(received.split(sizes)):
        rows[owner::ranks] = owned.view(owner_counts[owner], counts[rank], columns)
    return rows


def exchange_dtype(matrices: Tensor) -> torch.dtype:
    """Return the dtype in which ranks exchange matrices.

    bf16 is enough for the iteration (same source); parity tests in fp64 exchange fp64."""
    return torch.float64 if matrices.dtype == torch.float64 else torch.bfloat16
