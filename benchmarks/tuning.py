"""Compare steps of tuning with those of peft and transformers on a CPU: tokens per second, and peak memory.

    python -m benchmarks.tuning        # prints the table and writes docs/results/benchmarks/tuning.md

A step of Phalanx is one of its trainer: it checks the tokens, and records what it measures. The peer is a
loop with nothing but the passes, the limit of the gradient's norm and AdamW, as trl's SFTTrainer runs it inside.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.model_parts import PARTS, ROWS, SIZES, STEPS, TOKENS, growth_of_steps, save_model
from benchmarks.pages import write_results
from phalanx.data.loader import prefetch
from tests.helpers.small_runs import make_trainer, small_run

PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "tuning.md"
RANK = 16
ADAPTERS: dict[str, dict[str, Any] | None] = {
    "all parameters": None,
    "LoRA, all products": {"targets": "linear"},
    "LoRA, queries and values": {"targets": ["wq", "wv"]},
    "DoRA, all products": {"targets": "linear", "dora": True},
}
"""The table [adapter] of a run, besides rank and alpha; None: full tuning."""
THEIR_TARGETS = {"linear": "all-linear", "wq": "q_proj", "wv": "v_proj"}
LOSS_TOLERANCE = 1e-4
TEXT = """# Tuning compared with peft

| trained | tokens/s | peft | ratio | peak memory | peft | ratio |
|---|---:|---:|---:|---:|---:|---:|
{rows}

A step trains a llama of width {width} and {layers} layers on {rows_of_tokens} sequences of {tokens} tokens in fp32 with
AdamW, on one thread of a CPU; adapters have rank {rank}. Steps of Phalanx are those of its trainer. The peer is
transformers, with peft if there are adapters, in a loop with nothing but the passes, the limit of the gradient's norm
and AdamW, as trl's SFTTrainer runs it inside; its attention is PyTorch's. Times are medians of {steps} steps, which
alternate between both programs. Memory is the growth of a process in its first two steps. First losses agree to
{tolerance:g} of their value, and as many parameters are trained.

Written by `python -m benchmarks.tuning`.
"""
Step = Callable[[], float]


def main() -> None:
    """Measure all kinds of tuning, and write the page."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        save_model(PARTS[0], Path(folder) / "model")
        for name in ADAPTERS:
            rows.append(measure(name, folder))
            print(rows[-1], flush=True)
    sizes = {"width": SIZES["hidden_size"], "layers": SIZES["num_hidden_layers"], "rank": RANK, "steps": STEPS}
    numbers = {"rows_of_tokens": ROWS, "tokens": f"{TOKENS:,}", "tolerance": LOSS_TOLERANCE}
    write_results(PAGE, TEXT.format(rows="\n".join(rows), **sizes, **numbers))


def measure(name: str, folder: str) -> str:
    """Return the row of a kind of tuning."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1, maxtasksperchild=1) as pool:  # a fresh process for each task
        theirs, ours = (pool.apply(peak_growth, (folder, name, program)) for program in PROGRAMS)
        their_seconds, our_seconds = pool.apply(step_seconds, (folder, name))
    speeds = [ROWS * TOKENS / seconds for seconds in (our_seconds, their_seconds)]
    return (
        f"| {name} | {speeds[0]:,.0f} | {speeds[1]:,.0f} | {speeds[0] / speeds[1]:.2f} "
        f"| {ours / 1e6:,.0f} MB | {theirs / 1e6:,.0f} MB | {ours / theirs:.2f} |"
    )


def our_step(folder: str, name: str, seen: list[Tensor]) -> tuple[Step, int]:
    """Return a step of Phalanx's trainer, and the number of parameters that it trains; `seen` gets its tokens."""
    adapter = ADAPTERS[name]
    changes: dict[str, Any] = {
        "model": {"from_hf": str(Path(folder) / "model")},
        "data.mask_documents": False,
        "training": {"steps": 100, "seq_len": TOKENS, "tokens_per_step": ROWS * TOKENS, "precision": "fp32"},
        "layout.micro_batch_size": ROWS,
        **({} if adapter is None else {"adapter": {"rank": RANK, "alpha": RANK, **adapter}}),
    }
    trainer = make_trainer(small_run(Path(json.__file__).parent, Path(tempfile.mkdtemp(dir=folder)), changes))
    first = next(prefetch(trainer.loader, 0, 1))
    seen += [torch.from_numpy(first.tokens).long(), torch.from_numpy(first.targets).long()]

    def repeated() -> Any:
        while True:
            yield first

    trained = sum(each.numel() for each in trainer.module.parameters() if each.requires_grad)
    stream = repeated()
    return lambda: trainer.train_step(stream)["loss"], trained


def their_step(folder: str, name: str, seen: list[Tensor]) -> tuple[Step, int]:
    """Return a step of transformers and peft on the tokens of `seen`, and the number of parameters that it trains."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(
        Path(folder) / "model", dtype=torch.float32, attn_implementation="sdpa"
    )
    adapter = ADAPTERS[name]
    if adapter is not None:
        from peft import LoraConfig, get_peft_model

        targets = adapter["targets"]
        theirs = THEIR_TARGETS[targets] if isinstance(targets, str) else [THEIR_TARGETS[target] for target in targets]
        model = get_peft_model(
            model, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=theirs, use_dora="dora" in adapter)
        )
    model.train()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    tokens, targets_BT = seen

    def step() -> float:
        optimizer.zero_grad()
        logits = model(tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return float(loss.detach())

    return step, sum(each.numel() for each in trained)


PROGRAMS = {"peft": their_step, "phalanx": our_step}


def peak_growth(folder: str, name: str, program: str) -> int:
    """Return the bytes by which a process grows in its first two steps."""
    torch.set_num_threads(1)
    seen: list[Tensor] = []
    if program == "peft":
        seen += [torch.randint(256, (ROWS, TOKENS)) for _ in range(2)]
    return growth_of_steps(PROGRAMS[program](folder, name, seen)[0])


def step_seconds(folder: str, name: str) -> list[float]:
    """Return the median seconds of a step of each program.

    Raises AssertionError if their first losses or numbers of trained parameters differ."""
    torch.set_num_threads(1)
    seen: list[Tensor] = []
    (ours, our_count), (theirs, their_count) = (make(folder, name, seen) for make in (our_step, their_step))
    assert our_count == their_count, f"{our_count} and {their_count} parameters are trained"
    seconds: dict[Step, list[float]] = {theirs: [], ours: []}
    losses = {}
    for _ in range(STEPS + 1):
        for step, times in seconds.items():
            start = time.perf_counter()
            loss = step()
            times.append(time.perf_counter() - start)
            losses.setdefault(step, loss)
    difference = abs(losses[ours] / losses[theirs] - 1)
    assert difference < LOSS_TOLERANCE, f"the programs have different losses: {losses}"
    return [statistics.median(times[1:]) for times in seconds.values()]


if __name__ == "__main__":
    main()
