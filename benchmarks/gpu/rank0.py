"""Rank 0 of 8 of llama3-8b under ZeRO-3, with a process group that sends nothing: what a step takes without a network,
and what memory it takes beside the prediction.

    python -m benchmarks.gpu.rank0 LAYERS none|selective|full [compile]     # a line of JSON, of this process's GPU
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
from phalanx.model.attention import Documents
from phalanx.parallel.dtensor_shards import local_tensor
from phalanx.parallel.mesh import build_mesh
from phalanx.spec.files.load import run_from_table
from phalanx.spec.run import RunSpec
from phalanx.train.learner import Learner, MicroBatch

TITLE = "Rank 0 of 8, without a network"
COLUMNS = (
    "recomputation",
    "layers",
    "ms a step",
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
llama3-8b (32 layers; fewer where these do not fit), zero3 on {RANKS} ranks, bf16, {MICRO_BATCHES} rows of {SEQ_LEN:,}
tokens a step, documents of {MEAN_DOCUMENT} tokens in the mean, AdamW. PyTorch's fake process group sends nothing: a
gather copies this rank's part {RANKS} times, a reduction does nothing, and gradients are set to zero. So the time is
that of the computation, and MFU (of 989 TFLOP/s, of the model's operations without recomputation) is what a network
that costs nothing would allow. Medians of {STEPS} steps after two. "predicted": `phalanx memory`.
"""
VARIANTS = [("none",), ("selective",), ("full",), ("none", "compile"), ("full", "compile")]


def measure(table: Table) -> None:
    """Do the steps of each variant in a process of its own."""
    for variant in VARIANTS:
        table.measure(", ".join(variant), partial(row, variant))


def row(variant: tuple[str, ...]) -> list[str]:
    """Measure with as many layers as fit."""
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
    allocated, predicted = result["allocated"], rank_memory(run, RANKS)["rank"].total
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
    """Do the steps, and print what they took."""
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
    documents = Documents(starts.int().cuda(), document_bounds(starts).cuda())
    return MicroBatch(ids[:, :-1], ids[:, 1:].contiguous(), documents)


def timed_step(learner: Learner, micros: list[MicroBatch]) -> float:
    """Do a step; return its seconds."""
    torch.cuda.synchronize()
    started_at = time.perf_counter()
    sums = learner.forward_backward(micros)
    for parameter in learner.strategy.trainable_parameters.values():
        if parameter.grad is not None:  # never written by a reduction that does nothing
            local_tensor(parameter.grad).zero_()
    reduced: Any = learner.reduce(sums)
    reduced.sums.tolist()
    float(reduced.norm)
    learner.update(1.0)
    torch.cuda.synchronize()
    return time.perf_counter() - started_at


if __name__ == "__main__":
    main(*sys.argv[1:])
