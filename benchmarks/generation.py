"""Compare generation with that of transformers on a CPU, both with caches of earlier tokens: tokens per second.

    python -m benchmarks.generation        # prints the table and writes docs/results/benchmarks/generation.md

Both programs have the same weights and must choose the same tokens. Runs alternate between them.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.model_parts import PARTS, SIZES, Part, save_model
from benchmarks.pages import write_results
from phalanx.model.generation import generate_batch
from phalanx.model.sampling import Sampling
from tests.helpers.random_models import load_model

PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "generation.md"
PROMPT_TOKENS = 256
NEW_TOKENS = 128
ROWS = (1, 8)
ROUNDS = 5
NAMES = ("grouped-query attention", "experts with biases, sinks", "latent attention", "gated delta rule")
TEXT = """# Generation compared with transformers

| part | model | rows | tokens/s | transformers | ratio |
|---|---|---:|---:|---:|---:|
{rows}

Each row of a batch has a prompt of {prompt} tokens, and {new} tokens are generated, the most likely ones, in fp32 on
one thread of a CPU. Both programs keep keys, values and states of earlier tokens, and choose the same tokens. Models
have width {width} and {layers} layers. Speeds are medians of {rounds} runs, which alternate between both programs, with
the pass of the prompts.

Written by `python -m benchmarks.generation`.
"""
Run = Callable[[], list[list[int]]]


def main() -> None:
    """Measure all models and batches, and write the page."""
    torch.set_num_threads(1)
    rows = []
    for part in PARTS:
        if part.name in NAMES:
            with tempfile.TemporaryDirectory() as folder:
                save_model(part, Path(folder))
                for num_rows in ROWS:
                    rows.append(measure(part, Path(folder), num_rows))
                    print(rows[-1], flush=True)
    page = TEXT.format(
        rows="\n".join(rows),
        prompt=PROMPT_TOKENS,
        new=NEW_TOKENS,
        width=SIZES["hidden_size"],
        layers=SIZES["num_hidden_layers"],
        rounds=ROUNDS,
    )
    write_results(PAGE, page)


def measure(part: Part, folder: Path, num_rows: int) -> str:
    """Return the row of a model and a number of prompts. Raises AssertionError if the programs choose other tokens."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, SIZES["vocab_size"], (num_rows, PROMPT_TOKENS), generator=generator)
    runs = [their_run(folder, prompts), our_run(folder, prompts)]
    seconds: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        tokens = []
        for run, times in zip(runs, seconds, strict=True):
            start = time.perf_counter()
            tokens.append(run())
            times.append(time.perf_counter() - start)
        assert tokens[0] == tokens[1], "the programs choose other tokens"
    theirs, ours = (num_rows * NEW_TOKENS / statistics.median(times) for times in seconds)
    return f"| {part.name} | {part.family} | {num_rows} | {ours:,.0f} | {theirs:,.0f} | {ours / theirs:.2f} |"


def their_run(folder: Path, prompts: Tensor) -> Run:
    """Return the generation of transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    limits = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0, "eos_token_id": None}

    def run() -> list[list[int]]:
        with torch.no_grad():
            new: Tensor = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, **limits)
        return new[:, PROMPT_TOKENS:].tolist()

    return run


def our_run(folder: Path, prompts: Tensor) -> Run:
    """Return the generation of Phalanx."""
    model = load_model(folder, torch.float32).eval()
    return lambda: generate_batch(model, list(prompts), NEW_TOKENS, Sampling(temperature=0))


if __name__ == "__main__":
    main()
