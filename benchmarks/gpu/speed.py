"""Time training steps on one GPU: Phalanx, a plain PyTorch loop and torchtitan, each in its own process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.gpu.harness import Table, run_json
from benchmarks.gpu.shapes import SHAPES, Shape
from benchmarks.gpu.speed_torchtitan import time_torchtitan
from phalanx.cost.exact.flops import training_flops_per_token

TITLE = "Speed on one GPU compared with a plain PyTorch loop"
COLUMNS = (
    "model, trainer",
    "ms per step",
    "tokens/s",
    "MFU",
    "relative to plain, compiled",
    "peak, GiB",
    "first step, s",
)
NOTES = """
Medians of three times four consecutive steps, after four warm-up steps. Between the four steps no trainer waits for the
GPU. All trainers use bf16 with fp32 master weights, fused AdamW, gradient clipping and causal attention. bf16 comes
from autocast in the plain loop, which compiles each block, as torchtitan does, and the loss. Phalanx has bf16
parameters. "Documents" are rows of masked documents with a mean length of 700 tokens; the plain loop masks none.
MFU is relative to 989 TFLOP/s, for the model's operations without recomputation.

1.1B: 16 layers, width 2,048, twice 4 rows of 4,096 tokens per step. 124M: 12 layers, width 768, vocabulary 50,304,
twice 32 rows of 1,024 tokens per step.

torchtitan is started by torchrun with the file that `phalanx export` writes: FSDP of one rank, bf16 parameters and fp32
master weights. Each row is one document, and two workers load the data. Its figures come from its log; the peak is the
memory that PyTorch's allocator reserved.
"""
PEAK_FLOPS = 989e12
"""Dense bf16 FLOP/s of an H100 SXM (NVIDIA's data sheet)."""
LIMIT_SECONDS = 150.0
Timer = Callable[[], dict[str, Any]]
"""Function that returns the measurements that `one_speed` prints."""


VARIANTS: dict[str, dict[str, Any]] = {
    "plain loop, compiled": {"plain": True, "compile": True},
    "plain loop": {"plain": True, "compile": False},
    "Phalanx": {"compile": False},
    "Phalanx, compiled": {"compile": True},
    "Phalanx, documents": {"compile": False, "documents": True},
    "Phalanx, compiled, documents": {"compile": True, "documents": True},
    "Phalanx, fp8, compiled": {"compile": True, "precision": "fp8"},
}


def measure(table: Table) -> None:
    """Time each variant of each shape, and torchtitan."""
    for name, shape in SHAPES.items():
        plain_seconds: list[float] = []
        timers: dict[str, Timer] = {
            variant: partial(run_json, "benchmarks.gpu.one_speed", name, variant, seconds=LIMIT_SECONDS)
            for variant in VARIANTS
        }
        timers["torchtitan, compiled"] = partial(time_torchtitan, shape)
        for trainer, time_trainer in timers.items():
            table.measure(f"{name}, {trainer}", partial(row, shape, trainer, time_trainer, plain_seconds))


def row(shape: Shape, trainer: str, time_trainer: Timer, plain_seconds: list[float]) -> list[str]:
    """Time one trainer; `plain_seconds` receives the time of the compiled plain loop, which runs first."""
    result = time_trainer()
    seconds = result["seconds"]
    if trainer == "plain loop, compiled":
        plain_seconds.append(seconds)
    rate = shape.tokens / seconds
    mfu = rate * training_flops_per_token(shape.model, shape.seq_len) / PEAK_FLOPS
    cells = (
        f"{seconds * 1e3:.0f}",
        f"{rate:,.0f}",
        f"{mfu:.1%}",
        f"{plain_seconds[0] / seconds:.2f}" if plain_seconds else "-",
    )
    return [*cells, f"{result['peak_bytes'] / 2**30:.1f}", f"{result['first']:.0f}"]
