"""Measure rank 0 of 8 of llama3-8b under ZeRO-3 without a network: step time, and memory compared with the prediction.

The process group sends nothing.

    python -m benchmarks.gpu.rank0 LAYERS none|selective|full [compile]   # prints a line of JSON for this process's GPU
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.gpu.harness import IS_DRY, Table, real_or_dry, run_json
from benchmarks.gpu.kernels import document_bounds, document_starts
from benchmarks.gpu.speed import PEAK_FLOPS
from phalanx.cost.exact.flops import training_flops_per_token
from phalanx.cost.exact.rank_memory import rank_memory
from phalanx.model.sequence_context import Documents
from phalanx.parallel.dtensor_shards import local_tensor
from phalanx.parallel.mesh import build_mesh
from phalanx.spec.files.load import run_from_table
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.train.learner import Learner, MicroBatch

TITLE = "Rank 0 of 8, without a network"
COLUMNS = (
    "recomputation",
    "layers",
    "ms per step",
    "tokens/s",
    "MFU",
    "allocated, GiB",
    "predicted",
    "measured / predicted",
    "reserved, GiB",
    "first step, s",
)
RANKS, SEQ_LEN, MICRO_BATCHES, MEAN_DOCUMENT = 8, 8192, 2, 700
STEPS, LAYERS = real_or_dry((4, (32, 24, 16)), (1, (32, 24)))
NOTES = f"""
llama3-8b has 32 layers, or fewer if these do not fit. It runs with zero3 on {RANKS} ranks, bf16 and AdamW. A step has
{MICRO_BATCHES} rows of {SEQ_LEN:,} tokens, and the mean length of documents is {MEAN_DOCUMENT} tokens. Figures are
medians of {STEPS} steps after two warm-up steps. "Predicted" is `phalanx memory`.

PyTorch's fake process group sends nothing. A gather copies this rank's shard {RANKS} times, a reduction does nothing,
and gradients are set to zero. The time is therefore that of the computation, and MFU is the maximum with an ideal
network. It is relative to 989 TFLOP/s, for the model's operations without recomputation.
"""
VARIANTS = [("none",), ("selective",), ("full",), ("none", "compile"), ("full", "compile")]


def measure(table: Table) -> None:
    """Run the steps of each variant in its own process."""
    for variant in VARIANTS:
        table.measure(", ".join(variant), partial(row, variant))


def row(variant: tuple[str, ...]) -> list[str]:
    """Measure with the maximum number of layers that fits."""
    for layers in LAYERS:
        try:
            result = run_json("benchmarks.gpu.rank0", str(layers), *variant)
        except RuntimeError as error:
            if "out of memory" not in str(error) or layers == LAYERS[-1]:
                raise
            print(f"{variant} with {layers} layers: {error}", file=sys.stderr, flush=True)
            continue
        break
    run = described_run(layers, *variant)
    rate = SEQ_LEN * MICRO_BATCHES / result["seconds"]
    mfu = rate * training_flops_per_token(run.model, SEQ_LEN) / PEAK_FLOPS
    allocated, predicted = result["allocated"], rank_memory(ResolvedRun(run, RANKS))["rank"].total
    cells = [f"{layers}", f"{result['seconds'] * 1e3:,.0f}", f"{rate:,.0f}", f"{mfu:.1%}"]
    cells += [f"{allocated / 2**30:.1f}", f"{predicted / 2**30:.1f}", f"{allocated / predicted:.3f}"]
    return [*cells, f"{result['reserved'] / 2**30:.1f}", f"{result['first']:.0f}"]


def described_run(layers: int, recomputation: str, compile: str = "") -> RunSpec:
    """Return the run of a variant."""
    return run_from_table(
        {
            "name": "rank0",
            "model": {"preset": "llama3-8b", "num_layers": layers},
            "training": {
                "seq_len": SEQ_LEN,
                "tokens_per_step": RANKS * SEQ_LEN * MICRO_BATCHES,
                "precision": "bf16",
                "compile": compile == "compile",
            },
            "cluster": {"device": "cuda"},
            "layout": {"data_parallel": "zero3", "micro_batch_size": 1, "activation_checkpointing": recomputation},
        }
    )


def main(layers: str, *variant: str) -> None:
    """Run the steps, and print their times and memory."""
    run, device = described_run(int(layers), *variant), torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    weights = (lambda name, shape: torch.empty(shape)) if IS_DRY else None
    learner = Learner(run, build_mesh(run.layout, RANKS, "cuda"), device, weights)
    micros = [random_micro_batch(run, seed) for seed in range(MICRO_BATCHES)]
    seconds = [timed_step(learner, micros) for _ in range(2 + STEPS)]
    print(
        json.dumps(
            {
                "seconds": median(seconds[2:]),
                "first": seconds[0],
                "allocated": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
            }
        )
    )


def random_micro_batch(run: RunSpec, seed: int) -> MicroBatch:
    """Return a row of random tokens on the device."""
    ids = torch.randint(run.model.vocab_size, (1, SEQ_LEN + 1), generator=torch.Generator().manual_seed(seed)).cuda()
    starts = document_starts(1, SEQ_LEN, MEAN_DOCUMENT)
    documents = Documents(starts.int().cuda(), document_bounds(starts).cuda(), document_bounds(starts).tolist())
    return MicroBatch(ids[:, :-1], ids[:, 1:].contiguous(), documents)


def timed_step(learner: Learner, micros: list[MicroBatch]) -> float:
    """Run a step; return its seconds."""
    torch.cuda.synchronize()
    started_at = time.perf_counter()
    sums = learner.forward_backward(micros)
    for parameter in learner.strategy.trainable_parameters.values():
        if parameter.grad is not None:  # the fake reduction does not write gradients
            local_tensor(parameter.grad).zero_()
    reduced: Any = learner.reduce(sums)
    reduced.sums.tolist()
    float(reduced.norm)
    learner.update(1.0)
    torch.cuda.synchronize()
    return time.perf_counter() - started_at


if __name__ == "__main__":
    main(*sys.argv[1:])
