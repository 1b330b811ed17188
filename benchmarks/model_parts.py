"""Compare the parts of models with those of transformers on a CPU: tokens per second, and peak memory of a step.

    python -m benchmarks.model_parts        # prints the table and writes docs/results/benchmarks/model_parts.md

A row is a small model of the family whose part it is. Both programs have the same weights and compute the same logits.
Steps alternate between them; memory is that of a process of each.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.pages import write_results
from tests.helpers.random_models import load_model

PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "model_parts.md"
ROWS, TOKENS = 2, 1024
STEPS = 5
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": TOKENS,
}
Step = Callable[[], None]


@dataclass(frozen=True)
class Part:
    """A part of a model, and a small model with it."""

    name: str
    family: str
    """model_type of the model."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of its config.json, besides `SIZES`."""


PARTS = [
    Part("grouped-query attention", "llama", {"num_key_value_heads": 2}),
    Part(
        "experts with biases, sinks",
        "gpt_oss",
        {"num_key_value_heads": 2, "head_dim": 64, "num_local_experts": 16, "num_experts_per_tok": 4},
    ),
    Part(
        "latent attention",
        "youtu",
        {
            "num_key_value_heads": 8,
            "q_lora_rank": 192,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
        },
    ),
    Part("Mamba-2", "nemotron_h", {"hybrid_override_pattern": "MMMM", "mamba_num_heads": 16, "mamba_head_dim": 64}),
    Part(
        "gated delta rule",
        "qwen3_5_text",
        {
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
    Part(
        "Kimi Delta Attention",
        "kimi_linear",
        {
            "num_key_value_heads": 8,
            "linear_num_heads": 4,
            "num_hidden_layers": 2,  # a step of transformers takes half a minute
            "layer_types": ["linear_attention"] * 2,
            "mlp_layer_types": ["dense", "sparse"],
            "num_experts": 8,
            "num_experts_per_token": 2,
            "moe_intermediate_size": 256,
        },
    ),
]
TEXT = """# Parts of models compared with transformers

| part | model | tokens/s | transformers | ratio | peak memory | transformers | ratio |
|---|---|---:|---:|---:|---:|---:|---:|
{rows}

A step is the forward and backward pass of {rows_of_tokens} sequences of {tokens} tokens in fp32, on one thread of a
CPU. Models have width {width} and {layers} layers, that of Kimi Delta
Attention two. Times are medians of {steps} steps, which alternate between both
programs. Memory is the growth of a process in its first two steps. Logits agree to {tolerance} of their standard
deviation.

Written by `python -m benchmarks.model_parts`.
"""
TOLERANCE = 2e-3


def main() -> None:
    """Measure all parts, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="names of parts; by default all, and the page is written")
    names = parser.parse_args().parts
    rows = []
    for part in PARTS:
        if not names or part.name in names:
            rows.append(measure(part))
            print(rows[-1], flush=True)
    if not names:
        page = TEXT.format(
            rows="\n".join(rows),
            rows_of_tokens=ROWS,
            tokens=f"{TOKENS:,}",
            width=SIZES["hidden_size"],
            layers=SIZES["num_hidden_layers"],
            steps=STEPS,
            tolerance=f"{TOLERANCE:.1%}",
        )
        write_results(PAGE, page)


def measure(part: Part) -> str:
    """Return the row of a part."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(part, Path(folder))
        context = multiprocessing.get_context("spawn")
        with context.Pool(1, maxtasksperchild=1) as pool:  # a fresh process for each task
            theirs, ours = (pool.apply(peak_growth, (folder, program)) for program in PROGRAMS)
            their_seconds, our_seconds = pool.apply(step_seconds, (folder,))
    speeds = [ROWS * TOKENS / seconds for seconds in (our_seconds, their_seconds)]
    return (
        f"| {part.name} | {part.family} | {speeds[0]:,.0f} | {speeds[1]:,.0f} | {speeds[0] / speeds[1]:.2f} "
        f"| {ours / 1e6:,.0f} MB | {theirs / 1e6:,.0f} MB | {ours / theirs:.2f} |"
    )


def save_model(part: Part, folder: Path) -> None:
    """Save a model with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(part.family, **{**SIZES, "pad_token_id": 0, **part.config})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def their_logits(folder: str) -> Callable[[Tensor], Tensor]:
    """Return the model of transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    return lambda tokens: model(tokens, use_cache=False).logits


def our_logits(folder: str) -> Callable[[Tensor], Tensor]:
    """Return the model of Phalanx."""
    model = load_model(Path(folder), torch.float32)
    return lambda tokens: model(tokens)[0]


PROGRAMS = {"transformers": their_logits, "phalanx": our_logits}


def make_step(logits: Callable[[Tensor], Tensor]) -> Step:
    """Return a function that computes a forward and a backward pass."""
    tokens = some_tokens()

    def step() -> None:
        loss = F.cross_entropy(logits(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()

    return step


def some_tokens() -> Tensor:
    """Return random token ids, [B, T]."""
    return torch.randint(SIZES["vocab_size"], (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))


def peak_growth(folder: str, program: str) -> int:
    """Return the bytes by which a process grows in its first two steps."""
    torch.set_num_threads(1)
    return growth_of_steps(make_step(PROGRAMS[program](folder)))


def growth_of_steps(step: Callable[[], object]) -> int:
    """Return the bytes by which this process grows in two steps."""
    # Loading may have needed more memory than the steps do: the peak starts here.
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_bytes("VmRSS")
    for _ in range(2):
        step()
    return _resident_bytes("VmHWM") - before


def _resident_bytes(field: str) -> int:
    """Return the resident memory of this process, now or at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def step_seconds(folder: str) -> list[float]:
    """Return the median seconds of a step of each program. Raises AssertionError if their logits differ."""
    torch.set_num_threads(1)
    models = [load(folder) for load in PROGRAMS.values()]
    with torch.no_grad():
        theirs, ours = (model(some_tokens()) for model in models)
    assert (theirs - ours).abs().max() < TOLERANCE * theirs.std(), "the programs compute different logits"
    steps = [make_step(model) for model in models]
    seconds: list[list[float]] = [[], []]
    for _ in range(STEPS + 1):
        for step, times in zip(steps, seconds, strict=True):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
    return [statistics.median(times[1:]) for times in seconds]


if __name__ == "__main__":
    main()
