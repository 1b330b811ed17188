"""Training steps of one GPU: Phalanx beside a plain PyTorch loop, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from phalanx.cost.exact.flops import training_flops_per_token
from phalanx.spec.model import ModelSpec

TITLE = "Speed on one GPU, beside a plain PyTorch loop"
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
    "124M": Shape(llama(12, 768, 12, 12, 2048, 50304, 1024), seq_len=1024, micro_batch=32),
    "1.1B": Shape(llama(16, 2048, 16, 8, 8192, 32000, 4096), seq_len=4096, micro_batch=4),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain loop": {"plain": True, "compile": False},
    "plain loop, compiled": {"plain": True, "compile": True},
    "Phalanx": {"compile": False},
    "Phalanx, compiled": {"compile": True},
    "Phalanx, zero1, compiled": {"compile": True, "data_parallel": "zero1"},
    "Phalanx, documents": {"compile": False, "documents": True},
    "Phalanx, zero1, compiled, documents": {"compile": True, "data_parallel": "zero1", "documents": True},
}


def measure() -> str:
    """Time each variant of each shape; returns the page's text."""
    lines = [
        "| model | trainer | ms a step | tokens/s | MFU | of plain compiled | peak, GiB | first step, s |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, shape in SHAPES.items():
        results = {variant: time_variant(name, variant) for variant in VARIANTS}
        plain = results["plain loop, compiled"]
        for variant, result in results.items():
            if "problem" in result:
                lines.append(f"| {name} | {variant} | {result['problem']} | | | | | |")
                continue
            rate = shape.tokens / result["seconds"]
            mfu = rate * training_flops_per_token(shape.model, shape.seq_len) / PEAK_FLOPS
            ratio = f"{plain['seconds'] / result['seconds']:.2f}" if "seconds" in plain else "-"
            lines.append(
                f"| {name} | {variant} | {result['seconds'] * 1e3:.0f} | {rate:,.0f} | {mfu:.1%} | {ratio} "
                f"| {result['peak_bytes'] / 2**30:.1f} | {result['first']:.0f} |"
            )
    table = "\n".join(lines)
    return f"""{table}

Medians of 8 steps after 4. bf16 with fp32 master weights (autocast; zero1: bf16 parameters), fused AdamW, clipping,
causal attention; "documents": rows of documents of 700 tokens in the mean, which do not see each other, where the plain
loop has none. MFU of 989 TFLOP/s, of the model's operations without recomputation."""


def time_variant(shape: str, variant: str) -> dict[str, Any]:
    """Time one variant in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gpu.one_speed", shape, variant]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"problem": f"not done in {LIMIT_SECONDS:g} s"}
    if done.returncode:
        print(done.stderr[-1500:], flush=True)
        return {"problem": done.stderr.strip().splitlines()[-1][:120]}
    result = json.loads(done.stdout.splitlines()[-1])
    print(shape, variant, result, flush=True)
    return dict(result)
