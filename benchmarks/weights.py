"""Measure the time in which a rank draws its initial weights: rank 0 of many ranks, alone on this CPU.

    python -m benchmarks.weights        # prints the table and writes docs/results/benchmarks/weights.md

Previously, each rank drew all weights of the model. That time is extrapolated from one block, embedding and head."""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.pages import write_results
from phalanx.model.init import DrawnWeights, Weights
from phalanx.model.transformer import Transformer
from phalanx.parallel.apply import apply_layout
from phalanx.parallel.init_parameters import init_parameters
from phalanx.parallel.mesh import build_mesh
from phalanx.parallel.strategy import Strategy
from phalanx.spec.files.load import load_model_spec
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.train.training_data import await_checkpoint

PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "weights.md"


def all_weights_seconds(spec: ModelSpec) -> float:
    """Return the seconds for all weights of a model, extrapolated from one block, the embedding and the head."""
    weights = DrawnWeights(spec, 0)
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in Transformer(spec).named_parameters()}
    of_block = [name for name in shapes if name.startswith("blocks.1.")]
    others = [name for name in shapes if not name.startswith("blocks.")]

    def seconds(names: Iterable[str]) -> float:
        started_at = time.perf_counter()
        for name in names:
            weights(name, shapes[name])
        return time.perf_counter() - started_at

    return spec.num_layers * seconds(of_block) + seconds(others)


def init_seconds(strategy: Strategy, weights: Weights) -> float:
    """Return the seconds until this rank's parameters have their values."""
    started_at = time.perf_counter()
    init_parameters(strategy, weights)
    return time.perf_counter() - started_at


def main() -> None:
    """Measure, print the table and write the page."""
    parser = argparse.ArgumentParser("benchmarks.weights")
    parser.add_argument("--model", default="llama3-70b")
    parser.add_argument("--ranks", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    spec, layout = load_model_spec(args.model), Layout(data_parallel="zero3")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
    mesh = build_mesh(layout, args.ranks, "cpu")
    strategy = apply_layout(spec, layout, mesh, torch.device("cpu"), lambda name, shape: torch.zeros(()).expand(shape))
    awaited = init_seconds(strategy, await_checkpoint)
    own = init_seconds(strategy, DrawnWeights(spec, 0))
    page = f"""# Time in which a rank draws its initial weights

| {args.model}, zero3 on {args.ranks} ranks | seconds per rank |
|---|---:|
| all weights of the model, the previous method | {all_weights_seconds(spec):.1f} |
| only the rows of the rank | {own:.1f} |
| no weights, before a checkpoint is loaded | {awaited:.1f} |

Rank 0 runs alone on one thread of a CPU ({platform.machine()}, torch {torch.__version__}). The time for all weights is
extrapolated from one block, the embedding and the head. The values are equal in every layout
(`tests/parallel/test_init_parameters.py`).

- Written by `python -m benchmarks.weights`.
"""
    print(page)
    write_results(PAGE, page)


if __name__ == "__main__":
    main()
