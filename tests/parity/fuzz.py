"""Random valid layouts, each held against one process like the rows of the table.

python -m tests.parity.fuzz --count 50 --seed 1      # prints a line for each; exits with 1 if one differs
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from phalanx.cost.exact.layout_checks import check_layout
from phalanx.schedule.registry import PUBLISHED
from phalanx.spec.errors import UserError
from phalanx.spec.layout import SHARDED_STRATEGIES
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from tests.helpers.small_runs import DENSE, GPT2, MOE, Table, small_run, train_and_evaluate

STEPS = 5
SEQUENCES_PER_STEP = 8
TOLERANCE = 1e-10
MODELS: dict[str, Table] = {
    "dense": DENSE,
    "moe": MOE,
    "gpt2": {**DENSE, **GPT2},
    "tied": {**DENSE, "tie_embeddings": True},
}


def draw_layout(dice: random.Random) -> tuple[int, str, int, Table]:
    """Ranks, a model, its layers, and what to change in the run file; it may be invalid."""
    world_size, model = dice.choice([2, 2, 4, 4, 4, 8]), dice.choice(["moe", *MODELS])
    pp = dice.choice([size for size in (1, 1, 2, 4, 8) if world_size % size == 0])
    tp = dice.choice([size for size in (1, 1, 2, 4) if world_size // pp % size == 0])
    cp = dice.choice([size for size in (1, 1, 2, 4) if world_size // pp // tp % size == 0])
    ep = dice.choice([1, 2, 4]) if model == "moe" else 1
    data = dice.choice(["ddp", "zero1", "zero2", "zero3", "hsdp", "parameter_server"])
    layout: Table = {"layout.data_parallel": data, "layout.pp": pp}
    layout["layout.activation_checkpointing"] = dice.choice(["none", "none", "selective", "full"])
    if pp > 1:
        layout["layout.schedule"] = dice.choice(list(PUBLISHED))
        if layout["layout.schedule"] == "interleaved":
            layout["layout.virtual_stages"] = 2
    if tp > 1:
        layout |= {"layout.tp": tp, "layout.sequence_parallel": dice.choice([True, True, False])}
    if cp > 1:
        layout |= {"layout.cp": cp, "layout.cp_method": dice.choice(["ring", "ulysses"])}
    if ep > 1:
        layout["layout.ep"] = ep
    if data == "hsdp":
        layout["layout.dp_shard"] = 2
    if data in SHARDED_STRATEGIES:
        layout["layout.offload"] = dice.choice(["none", "none", "cpu"])
    if data == "parameter_server":
        layout["layout.num_servers"] = dice.choice([1, 2])
    if data in ("ddp", "zero1", "zero2"):
        layout["layout.bucket_mb"] = dice.choice([0.01, 25.0])
    layout["layout.micro_batch_size"] = dice.choice([1, 1, 1, 2] if pp > 1 else [1, 2, 4])
    layout["optimizer.name"] = dice.choice(["adamw", "adamw", "sgd", "muon"])
    if pp > 1:
        layout["layout.rank_order"] = dice.choice(["data", "data", "pipeline"])
    layout["training.tokens_per_step"] = (
        dice.choice([SEQUENCES_PER_STEP, SEQUENCES_PER_STEP, SEQUENCES_PER_STEP - 1]) * 32
    )
    return world_size, model, dice.choice([4, 8] if pp > 1 else [2, 4]), layout


def is_valid_layout(world_size: int, run: RunSpec) -> bool:
    """Whether training takes the layout."""
    try:
        check_layout(run, world_size)
    except UserError:
        return False
    return True


def draw_valid_layouts(seed: int, count: int, text: Path) -> list[tuple[int, str, int, Table]]:
    """So many valid ones."""
    dice, found = random.Random(seed), []
    while len(found) < count:
        world_size, model, layers, changes = drawn = draw_layout(dice)
        try:
            run = small_run(text, text.parent, run_settings(model, layers, changes))
        except UserError:
            continue
        if is_valid_layout(world_size, run):
            found.append(drawn)
    return found


def run_settings(model: str, layers: int, changes: Table) -> Table:
    """A run's changes with its model."""
    return {"model": {**MODELS[model], "num_layers": layers}, "training.steps": STEPS, **changes}


@cache
def single_process_trajectory(
    text: Path, model: str, layers: int, changes: tuple[tuple[str, Any], ...]
) -> list[tuple[float, float]]:
    """One process's losses and norms."""
    return train_and_evaluate(small_run(text, Path(tempfile.mkdtemp()), run_settings(model, layers, dict(changes))))


def max_relative_difference(text: Path, world_size: int, model: str, layers: int, changes: Table) -> float:
    """The largest relative difference of a loss or norm from one process's, over ranks and steps."""
    kept = {key: value for key, value in changes.items() if not key.startswith("layout.")}
    expected = single_process_trajectory(text, model, layers, tuple(sorted(kept.items())))
    run = small_run(text, Path(tempfile.mkdtemp()), run_settings(model, layers, changes))
    results = rank_pool(world_size).run(train_and_evaluate, run)
    return max(
        abs(got - wanted) / abs(wanted)
        for result in results
        for step, whole in zip(result, expected, strict=True)
        for got, wanted in zip(step, whole, strict=True)
    )


def main() -> None:
    """Draw, run, say."""
    parser = argparse.ArgumentParser("tests.parity.fuzz")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    text, wrong = Path(json.__file__).parent, 0
    for world_size, model, layers, changes in draw_valid_layouts(asked.seed, asked.count, text):
        try:
            worst = max_relative_difference(text, world_size, model, layers, changes)
            said = f"{worst:.1e}"
        except Exception as error:  # a layout that ends in an error is a finding like any other
            worst, said = float("inf"), f"{type(error).__name__}: {str(error)[-600:]}"
        wrong += worst > TOLERANCE
        shown = " ".join(f"{key.partition('.')[2]}={value}" for key, value in changes.items())
        print(f"{'ok ' if worst <= TOLERANCE else 'BAD'} {said} x{world_size} {model}-{layers} {shown}", flush=True)
    print(f"{asked.count - wrong} of {asked.count} layouts of seed {asked.seed} within {TOLERANCE:g}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
