"""Small runs and node layouts whose traffic is counted by hand."""

from __future__ import annotations

from typing import Any

from phalanx.plan.placement.findings import NodeLayout, node_layout
from phalanx.plan.placement.traffic_matrix import TrafficMatrix
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.files.load import run_from_table
from phalanx.spec.run import RunSpec

DENSE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 64,
    "max_seq_len": 32,
}
MOE = {**DENSE, "moe": {"num_experts": 8, "top_k": 2, "expert_ffn_size": 16, "num_shared_experts": 1}}


def make_run(layout: dict[str, Any], model: dict[str, Any] = DENSE, tokens: int = 2048) -> RunSpec:
    training = {"seq_len": 32, "tokens_per_step": tokens, "precision": "fp32", "steps": 100}
    return run_from_table({"model": model, "training": training, "layout": {"micro_batch_size": 1, **layout}})


def make_node_layout(nproc: int) -> NodeLayout:
    return node_layout(ClusterSpec(), nproc)


def matrix_entries(matrix: TrafficMatrix) -> dict[tuple[int, int], float]:
    return {(int(a), int(b)): float(c) for a, b, c in zip(matrix.source, matrix.target, matrix.bytes, strict=True)}
