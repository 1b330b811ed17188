"""Plain PyTorch loop around the same model: DDP, DDP with ZeroRedundancyOptimizer (zero1), or FSDP2.

`zero2` is FSDP2 without resharding after the forward pass."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.rank import Step
from benchmarks.shapes import OPTIMIZER, RANKS, SEED, STEPS, Shape
from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.loader import TokenLoader, prefetch
from phalanx.model.init import initial_weight
from phalanx.model.transformer import Transformer

ADAMW = {"lr": OPTIMIZER.learning_rate, "betas": OPTIMIZER.betas, "fused": True}


def build(shape: Shape, layout: str, dataset: IndexedDataset) -> Step:
    sharded = layout in ("zero2", "fsdp")
    model: nn.Module = transformer(shape)
    if sharded:
        mesh = init_device_mesh("cpu", (RANKS,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=layout == "fsdp")
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    optimizer = sharded_adamw(model) if layout == "zero1" else adamw(model)
    batches = prefetch(loader(shape, dataset), 0, STEPS)

    def step() -> float:
        batch = next(batches)
        tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
        parts = list(zip(tokens.split(shape.micro_batch), targets.split(shape.micro_batch), strict=True))
        total = torch.zeros(())
        optimizer.zero_grad()
        for index, (x, y) in enumerate(parts):
            last = index == len(parts) - 1
            if sharded:
                model.set_requires_gradient_sync(last)
            with nullcontext() if last or sharded else model.no_sync():
                logits, _ = model(x)
                loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / targets.numel()
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
        optimizer.step()
        dist.all_reduce(total)
        return total.item() / RANKS

    return step


def transformer(shape: Shape) -> Transformer:
    """Return the model that Phalanx trains, with its initial weights."""
    model = Transformer(shape.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_weight(shape.model, name, parameter.shape, SEED))
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that Phalanx uses, with weight decay for matrices only."""
    return torch.optim.AdamW(groups(model), **ADAMW)


def sharded_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return this optimizer with its state sharded over ranks."""
    return ZeroRedundancyOptimizer(groups(model), optimizer_class=torch.optim.AdamW, **ADAMW)


def groups(model: nn.Module) -> list[dict[str, object]]:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": matrices, "weight_decay": OPTIMIZER.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def loader(shape: Shape, dataset: IndexedDataset) -> TokenLoader:
    """Return the loader of the batches that Phalanx trains on."""
    return TokenLoader(dataset, shape.sequence, shape.sequences, SEED, dist.get_rank(), RANKS, mask_documents=False)
