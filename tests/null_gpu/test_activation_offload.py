"""Inputs of recomputed blocks in pinned CPU memory: peaks of a GPU, and its tensors after the forward pass."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

import pytest
import torch

from phalanx.cost.exact.rank_memory import rank_memory
from phalanx.parallel.mesh import build_mesh
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.train.learner import Learner
from phalanx.verify.dry_run import run_step
from tests.helpers.small_runs import Table, small_run
from tests.null_gpu.layouts import BF16

TOKENS = 32768
LLAMA: Table = {
    "vocab_size": 512,
    "hidden_size": 1024,
    "num_layers": 8,
    "num_heads": 8,
    "num_kv_heads": 2,
    "ffn_hidden_size": 2816,
    "max_seq_len": TOKENS,
}
STREAM_BYTES = 2 * TOKENS * 1024
CUDA = torch.device("cuda", 0)
RECOMPUTATIONS: dict[str, Table] = {
    "full": {"layout.activation_checkpointing": "full"},
    "offload": {"layout.activation_checkpointing": "offload"},
    "offload in 3": {"layout.activation_checkpointing": "offload", "layout.recomputed_blocks": 3},
}


def long_run(documents: Path, tmp_path: Path, changes: Table) -> RunSpec:
    """A Llama of 8 layers that trains on one sequence of 32,768 tokens a step."""
    training: Table = {"training.seq_len": TOKENS, "training.tokens_per_step": TOKENS, "data.mask_documents": False}
    layout: Table = {"layout.data_parallel": "zero1", "layout.bucket_mb": 1.0}  # gradients are allocated by bucket
    return small_run(documents, tmp_path, {**BF16, "model": LLAMA, **training, **layout, **changes})


def build_learner(run: RunSpec) -> Learner:
    torch.backends.cuda.enable_cudnn_sdp(False)
    return Learner(run, build_mesh(run.layout, 1, "cuda"), CUDA, weights=lambda _, shape: torch.zeros(shape))


@pytest.mark.parametrize(
    ("recomputation", "vocab_size"),
    [("full", 512), ("offload", 512), ("full", 65536), ("offload", 65536), ("offload in 3", 65536)],
)
def test_bytes_that_a_step_allocates_equal_prediction(
    recomputation: str, vocab_size: int, documents: Path, tmp_path: Path
) -> None:
    """Memory peaks in a recomputed block with a small vocabulary, and in the loss with a large one."""
    changes = {**RECOMPUTATIONS[recomputation], "model": {**LLAMA, "vocab_size": vocab_size}}
    run = long_run(documents, tmp_path, changes)
    learner = build_learner(run)
    for _ in range(2):
        run_step(learner)
    gc.collect()
    between_steps = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run_step(learner)
    measured = torch.cuda.max_memory_allocated() - between_steps
    predicted = rank_memory(ResolvedRun(run, 1))["rank"]
    assert measured == pytest.approx(predicted.total - predicted.parameters - predicted.optimizer, rel=0.01)
    num_offloaded = {"full": 0, "offload": 8, "offload in 3": 3}[recomputation]
    assert predicted.offloaded_activations == num_offloaded * STREAM_BYTES


@pytest.mark.parametrize(("recomputation", "num_inputs"), [("full", 8), ("offload", 0), ("offload in 3", 0)])
def test_inputs_of_blocks_are_not_on_the_device_after_the_forward_pass(
    recomputation: str, num_inputs: int, documents: Path, tmp_path: Path
) -> None:
    """Blocks without recomputation save six tensors of the size of their inputs: four inputs of norms and matrix
    products, queries, and the output of attention."""
    run = long_run(documents, tmp_path, RECOMPUTATIONS[recomputation])
    learner = build_learner(run)
    run_step(learner)
    before = allocated_tensors()
    tokens = torch.zeros(1, TOKENS, dtype=torch.long, device=CUDA)
    logits, _ = learner.strategy.model(tokens)
    loss = learner.strategy.cross_entropy(logits, tokens, -100)
    del logits
    alive = allocated_tensors() - before
    num_plain_blocks = 5 if recomputation == "offload in 3" else 0
    last_norm_and_head = 2
    assert alive[STREAM_BYTES] == num_inputs + 6 * num_plain_blocks + last_norm_and_head
    assert loss.requires_grad


def allocated_tensors() -> Counter[int]:
    """Return the number of tensors on the device by size in bytes."""
    gc.collect()
    return Counter(
        block["requested_size"]
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    )
