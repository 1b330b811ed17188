"""Time one trainer on this process's GPU: python -m benchmarks.gpu.one_speed SHAPE VARIANT prints a line of JSON."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.gpu.shapes import SHAPES, STEPS, WARM_UP, Shape
from benchmarks.gpu.speed import VARIANTS
from benchmarks.peers.plain import adamw
from benchmarks.shapes import OPTIMIZER, SEED
from phalanx.data.indexed_dataset import IndexedDataset, IndexedWriter
from phalanx.data.loader import TokenLoader, prefetch
from phalanx.data.packing import Batch
from phalanx.data.tokenizer import byte_tokenizer
from phalanx.model.init import initial_weight
from phalanx.model.transformer import Transformer
from phalanx.train.step_metrics import ReadRecord
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import TrainingData

MEAN_DOCUMENT = 700
CONSECUTIVE_STEPS = 4
"""Steps between two waits for the GPU."""
Step = Callable[[], float | torch.Tensor | None]
"""Function that runs a step without waiting for the GPU, and returns a loss if there is one."""


def main(shape_name: str, variant_name: str) -> None:
    """Run the steps, and print their times and memory."""
    shape, variant = SHAPES[shape_name], dict(VARIANTS[variant_name])
    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        dataset = random_documents(Path(folder), shape)
        started_at = time.perf_counter()
        build = plain_step if variant.pop("plain", False) else phalanx_step
        step = build(shape, dataset, Path(folder), **variant)
        losses = [step()]
        torch.cuda.synchronize()
        first = time.perf_counter() - started_at
        losses += [step() for _ in range(WARM_UP - 1)]
        seconds = []
        for _ in range(STEPS // CONSECUTIVE_STEPS):
            torch.cuda.synchronize()
            started_at = time.perf_counter()
            losses += [step() for _ in range(CONSECUTIVE_STEPS)]
            torch.cuda.synchronize()
            seconds.append((time.perf_counter() - started_at) / CONSECUTIVE_STEPS)
    peak = torch.cuda.max_memory_allocated()
    result = {
        "seconds": median(seconds),
        "first": first,
        "peak_bytes": peak,
        "losses": [float(loss) for loss in losses if loss is not None],
    }
    print(json.dumps(result))


def random_documents(folder: Path, shape: Shape) -> IndexedDataset:
    """Write documents of random tokens for all steps."""
    dice = np.random.default_rng(0)
    total = shape.tokens * (WARM_UP + STEPS + 1)
    with IndexedWriter(folder / "tokens", np.dtype(np.uint16)) as writer:
        for length in dice.geometric(1 / MEAN_DOCUMENT, size=total // MEAN_DOCUMENT + 50):
            writer.add(dice.integers(0, shape.model.vocab_size, length))
    return IndexedDataset(folder / "tokens")


def phalanx_step(
    shape: Shape,
    dataset: IndexedDataset,
    folder: Path,
    **variant: Any,
) -> Step:
    """Return a step of Phalanx's trainer."""
    run = shape.run(**variant)
    corpus = TrainingData(dataset, dataset, byte_tokenizer())
    trainer = Trainer(run, corpus, folder, torch.device("cuda", 0), peak_flops=1e15)
    batches = prefetch(trainer.loader, 0, run.training.steps)
    reads: list[ReadRecord] = []

    def step() -> float | None:
        reads.append(trainer.launch_step(batches))
        return reads.pop(0)()["loss"] if len(reads) > 1 else None  # one step late, as `Trainer.train`

    return step


def plain_step(shape: Shape, dataset: IndexedDataset, folder: Path, compile: bool) -> Step:
    """Return a step as in nanoGPT, with autocast and fused AdamW; blocks (as in torchtitan) and loss are compiled."""
    torch.set_float32_matmul_precision("high")
    with torch.device("cuda"):
        model = Transformer(shape.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_weight(shape.model, name, parameter.shape, SEED))
    optimizer = adamw(model)

    def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    if compile:
        for block in model.blocks:
            block.compile()
    compute_loss = torch.compile(cross_entropy) if compile else cross_entropy
    batches = prefetch(
        TokenLoader(dataset, shape.seq_len, shape.micro_batch * shape.accumulation, SEED, 0, 1, mask_documents=False),
        0,
        WARM_UP + STEPS,
    )

    def step() -> torch.Tensor:
        total = torch.zeros((), device="cuda")
        for tokens, targets in micro_batches(next(batches), shape.micro_batch):
            with torch.autocast("cuda", torch.bfloat16):
                logits, _ = model(tokens)
                loss = compute_loss(logits, targets) / shape.accumulation
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def micro_batches(batch: Batch, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the rows of a step on the device, in micro-batches of `size` rows."""
    parts = [torch.from_numpy(x).pin_memory().to("cuda", non_blocking=True) for x in (batch.tokens, batch.targets)]
    return zip(*(part.split(size) for part in parts), strict=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
