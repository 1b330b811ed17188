"""DeepSpeed with ZeRO stages 0 (DDP) to 3, for the same model and optimizer."""

from __future__ import annotations

import deepspeed
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.plain import adamw, loader, transformer
from benchmarks.peers.rank import Step
from benchmarks.shapes import OPTIMIZER, STEPS, Shape
from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.loader import prefetch

STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3}


class WithLoss(nn.Module):
    """Model for DeepSpeed's engine, whose forward pass returns the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens)[0].flatten(0, 1), targets.flatten())


def build(shape: Shape, layout: str, dataset: IndexedDataset) -> Step:
    config = {
        "train_micro_batch_size_per_gpu": shape.micro_batch,
        "gradient_accumulation_steps": shape.accumulation,
        "gradient_clipping": OPTIMIZER.max_grad_norm,
        "zero_optimization": {"stage": STAGES[layout]},
    }
    model = WithLoss(transformer(shape))
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config, dist_init_required=False)
    batches = prefetch(loader(shape, dataset), 0, STEPS)

    def step() -> float:
        batch = next(batches)
        tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
        total = 0.0
        for x, y in zip(tokens.split(shape.micro_batch), targets.split(shape.micro_batch), strict=True):
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            total += loss.item() / shape.accumulation
        return total

    return step
