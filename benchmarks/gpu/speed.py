"""Training steps of one GPU: Phalanx beside a plain PyTorch loop, each in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.gpu.harness import Table, real_or_dry, run_json
from phalanx.cost.exact.flops import training_flops_per_token
from phalanx.spec.model import ModelSpec

TITLE = "Speed on one GPU, beside a plain PyTorch loop"
COLUMNS = ("model, trainer", "ms a step", "tokens/s", "MFU", "of plain compiled", "peak, GiB", "first step, s")
NOTES = """
Medians of 8 steps after 4. bf16 with fp32 master weights (autocast; zero1: bf16 parameters), fused AdamW, clipping,
causal attention; "documents": rows of documents of 700 tokens in the mean, which do not see each other, where the plain
loop has none. The plain loop compiles each block, as torchtitan does, and its loss. MFU of 989 TFLOP/s, of the model's
operations without recomputation. 1.1B: 16 layers, width 2,048, 4 rows of 4,096 tokens, twice a step; 124M: 12 layers,
width 768, vocabulary 50,304, 32 rows of 1,024, twice a step.
"""
PEAK_FLOPS = 989e12
"""Of an H100 SXM in bf16, dense (NVIDIA's data sheet)."""
LIMIT_SECONDS = 150.0


@dataclass(frozen=True)
class Shape:
    """A Llama and its batch."""

    model: ModelSpec
    seq_len: int
    micro_batch: int
    accumulation: int = 2

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.seq_len * self.micro_batch * self.accumulation


def llama(layers: int, width: int, heads: int, kv_heads: int, ffn: int, vocab: int, seq_len: int) -> ModelSpec:
    return ModelSpec(
        num_layers=layers,
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_hidden_size=ffn,
        vocab_size=vocab,
        max_seq_len=seq_len,
    )


SHAPES = {
    "1.1B": Shape(llama(16, 2048, 16, 8, 8192, 32000, 4096), seq_len=4096, micro_batch=4),
    "124M": Shape(llama(12, 768, 12, 12, 2048, 50304, 1024), seq_len=1024, micro_batch=32),
}
SHAPES = real_or_dry(SHAPES, {"dry": Shape(llama(2, 256, 4, 2, 512, 1024, 128), seq_len=128, micro_batch=4)})
VARIANTS: dict[str, dict[str, Any]] = {
    "plain loop, compiled": {"plain": True, "compile": True},
    "plain loop": {"plain": True, "compile": False},
    "Phalanx": {"compile": False},
    "Phalanx, compiled": {"compile": True},
    "Phalanx, zero1, compiled": {"compile": True, "data_parallel": "zero1"},
    "Phalanx, documents": {"compile": False, "documents": True},
    "Phalanx, zero1, compiled, documents": {"compile": True, "data_parallel": "zero1", "documents": True},
}


def measure(table: Table) -> None:
    """Time each variant of each shape."""
    for name, shape in SHAPES.items():
        plain_seconds: list[float] = []
        for variant in VARIANTS:
            table.measure(f"{name}, {variant}", partial(row, name, shape, variant, plain_seconds))


def row(name: str, shape: Shape, variant: str, plain_seconds: list[float]) -> list[str]:
    """Time one variant; `plain_seconds` is noted of the compiled plain loop, which comes first."""
    result = run_json("benchmarks.gpu.one_speed", name, variant, seconds=LIMIT_SECONDS)
    seconds = result["seconds"]
    if variant == "plain loop, compiled":
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
