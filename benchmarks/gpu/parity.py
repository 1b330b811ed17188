"""Compare layouts on NCCL, with ranks that share one GPU, with one process on a CPU.

Ranks take turns on the GPU, and a collective takes at least 15 ms. Therefore, most cases have two ranks, and all have
small models and two steps."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.harness import Table
from phalanx.testing import rank_pool
from tests.helpers.small_runs import DENSE, MOE, small_run, train_and_evaluate, write_documents

TITLE = "Layouts on NCCL compared with one process on a CPU"
COLUMNS = ("layout", "ranks", "precision", "difference", "limit", "passed", "seconds")
LIMIT_SECONDS, STEPS = 90.0, 2
DEEP = {"model": {**DENSE, "num_layers": 4}}
PIPELINE = {**DEEP, "layout.pp": 2, "layout.micro_batch_size": 1}
BF16 = {"training.precision": "bf16"}
COMPILED = {"training.compile": True}
WINDOWS = {"model": {**DENSE, "sliding_window": 9, "full_attention_layers": [1], "attention_sinks": True}}
Trajectory = Sequence[tuple[float, float]]
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "ddp": (2, {}),
    "zero1": (2, {"layout.data_parallel": "zero1"}),
    "zero2, offload": (2, {"layout.data_parallel": "zero2", "layout.offload": "cpu"}),
    "zero3": (2, {"layout.data_parallel": "zero3"}),
    "parameter server": (2, {"layout.data_parallel": "parameter_server"}),
    "tp 2": (2, {"layout.tp": 2}),
    "tp 2, no sequence parallelism": (2, {"layout.tp": 2, "layout.sequence_parallel": False}),
    "ring": (2, {"layout.cp": 2}),
    "ulysses": (2, {"layout.cp": 2, "layout.cp_method": "ulysses"}),
    "pp 2, 1f1b": (2, PIPELINE),
    "pp 2, zb-v": (2, {**PIPELINE, "layout.schedule": "zb-v"}),
    "pp 2, 1f1b, tied": (2, {**PIPELINE, "model": {**DENSE, "num_layers": 4, "tie_embeddings": True}}),
    "experts": (1, {"model": MOE}),
    "ep 2": (2, {"model": MOE, "layout.ep": 2}),
    "ep 2, zero3": (2, {"model": MOE, "layout.ep": 2, "layout.data_parallel": "zero3"}),
    "zero1, muon": (2, {"layout.data_parallel": "zero1", "optimizer.name": "muon"}),
    "zero3, recompute": (2, {"layout.data_parallel": "zero3", "layout.activation_checkpointing": "full"}),
    "one rank, bf16": (1, BF16),
    "zero1, bf16": (2, {"layout.data_parallel": "zero1", **BF16}),
    "ring, bf16, no documents": (2, {"layout.cp": 2, "data.mask_documents": False, **BF16}),
    "ulysses, bf16": (2, {"layout.cp": 2, "layout.cp_method": "ulysses", **BF16}),
    "experts, bf16": (1, {"model": MOE, **BF16}),
    "pp 2, interleaved": (2, {**PIPELINE, "layout.schedule": "interleaved", "layout.virtual_stages": 2}),
    "pp 4, 1f1b": (4, {**PIPELINE, "layout.pp": 4}),
    "zero3 x tp 2": (4, {"layout.data_parallel": "zero3", "layout.tp": 2}),
    "pp 2 x zero1, zb-h1": (4, {**PIPELINE, "layout.schedule": "zb-h1", "layout.data_parallel": "zero1"}),
    "windows and sinks": (1, WINDOWS),
    "windows and sinks, bf16": (1, {**WINDOWS, **BF16}),
    "one rank, compiled": (1, COMPILED),
    "one rank, bf16, compiled": (1, {**COMPILED, **BF16}),
    "zero3, recompute, compiled": (
        2,
        {"layout.data_parallel": "zero3", "layout.activation_checkpointing": "full", **COMPILED},
    ),
    "tp 2, compiled": (2, {"layout.tp": 2, **COMPILED}),
    "pp 2, zb-v, compiled": (2, {**PIPELINE, "layout.schedule": "zb-v", **COMPILED}),
    "ep 2, bf16, compiled": (2, {"model": MOE, "layout.ep": 2, **BF16, **COMPILED}),
    "zero2, bf16, compiled": (2, {"layout.data_parallel": "zero2", **BF16, **COMPILED}),
    "recomputed norms, bf16, compiled": (1, {"layout.activation_checkpointing": "norms", **BF16, **COMPILED}),
    "offloaded inputs of blocks, bf16, compiled": (
        1,
        {"layout.activation_checkpointing": "offload", **BF16, **COMPILED},
    ),
    "pp 2 x ring, bf16, compiled": (4, {**PIPELINE, "layout.cp": 2, **BF16, **COMPILED}),
}
LIMITS = {"fp64": 1e-10, "bf16": 2e-2}
NOTES = f"""
{STEPS} steps and an evaluation on NCCL, with ranks that share one GPU. `NCCL_HOSTID` gives each rank its own host, so
the ranks communicate by sockets. "Difference" is the largest relative difference of losses and gradient norms from one
process on a CPU in fp64. The limit of bf16 is {LIMITS["bf16"]:g}, or twice the difference of bf16 on that CPU if this
is larger.
"""


def measure(table: Table) -> None:
    """Train each layout, and compare it."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        text.mkdir()
        write_documents(text)
        for name, (ranks, changes) in CASES.items():
            table.measure(name, partial(compare, table, name, ranks, changes, text, Path(folder)))


def compare(table: Table, name: str, ranks: int, changes: dict[str, Any], text: Path, folder: Path) -> Sequence[object]:
    """Train a layout on the GPU, and one process on this CPU in fp64."""
    changes = {"training.compile": False, **changes, "training.steps": STEPS, "optimizer.warmup_steps": 1}
    alone = {key: value for key, value in changes.items() if not key.startswith("layout.")}
    alone["training.compile"] = False
    expected = train_and_evaluate(small_run(text, folder / "alone", {**alone, "training.precision": "fp64"}))
    run = small_run(text, folder / "gpu", changes)
    started_at = time.monotonic()
    results = rank_pool(ranks, "cuda").run(train_and_evaluate, run, "cuda", timeout=LIMIT_SECONDS)
    seconds = time.monotonic() - started_at
    difference = max(largest_difference(result, expected) for result in results)
    precision = run.training.precision
    limit = LIMITS[precision]
    if precision == "bf16":
        on_cpu = train_and_evaluate(small_run(text, folder / "bf16", {**alone, "training.precision": "bf16"}))
        limit = max(limit, 2 * largest_difference(on_cpu, expected))
    is_right = table.check(name, difference < limit)
    return ranks, precision, f"{difference:.1e}", f"{limit:.0e}", is_right, f"{seconds:.0f}"


def largest_difference(got: Trajectory, expected: Trajectory) -> float:
    """Return the largest relative difference of losses and gradient norms; infinite where one is not finite."""
    pairs = [pair for step in zip(got, expected, strict=True) for pair in zip(*step, strict=True)]
    differences = [abs(ours - right) / abs(right) for ours, right in pairs]
    return max(difference if math.isfinite(difference) else math.inf for difference in differences)
