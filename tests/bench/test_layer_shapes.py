"""The measured matrix products and attention are those of a rank's step, with its shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.bench.layer_shapes import AttentionShape, MatmulShape, attention_shapes, matmul_shapes
from phalanx.cost.exact.flops import rank_flops
from phalanx.spec.parts.block import blocks
from phalanx.spec.parts.flops import core_flops
from phalanx.spec.resolved_run import ResolvedRun
from tests.helpers.dry_run_cases import ADAPTER, FROZEN, LAYOUTS, MOE, dry_run_case
from tests.helpers.small_runs import small_run

TEXT = Path(json.__file__).parent


def layout_id(changes: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in changes.items() if key.startswith("layout."))


UNTUNED = [(ranks, changes) for ranks, changes in LAYOUTS if not changes.keys() & (FROZEN | ADAPTER).keys()]
"""Layouts whose backward pass has all products."""


@pytest.mark.parametrize(("world_size", "changes"), UNTUNED, ids=[layout_id(changes) for _, changes in UNTUNED])
def test_layer_shapes_flops_equal_rank_flops(world_size: int, changes: dict[str, Any], tmp_path: Path) -> None:
    """A backward pass counts twice as much as the forward pass, and recomputation is off. With a pipeline, the
    sum is at least that of the stage with the most FLOPs."""
    no_recomputation = {"layout.activation_checkpointing": "none", "layout.recomputed_blocks": None}
    resolved = ResolvedRun(small_run(TEXT, tmp_path, changes | no_recomputation), world_size)
    forward = sum(product.flops * count for product, (_, count) in matmul_shapes(resolved).items())
    forward += sum(core.flops * count for core, count in attention_shapes(resolved).items())
    # Scans are not measured.
    scans = [
        branch.part for block in blocks(resolved.run.model) for branch in block if branch.part.name == "side_mixer"
    ]
    tokens = resolved.batch.micro_batch_size * resolved.run.training.seq_len / resolved.layout.cp
    forward += sum(tokens * core_flops(part, resolved.run.training.seq_len, True) for part in scans)
    measured = 3 * forward * resolved.micro_batches
    max_flops = max(rank_flops(resolved, rank) for rank in range(world_size))
    assert measured == pytest.approx(max_flops, rel=0.02) or (
        resolved.layout.pp > 1 and max_flops <= measured < 1.4 * max_flops
    )


def test_layer_shapes_match_tensor_parallel_shard(tmp_path: Path) -> None:
    run = small_run(TEXT, tmp_path, dry_run_case(2, tp=2)[1])
    shapes = {names: (product, count) for product, (names, count) in matmul_shapes(ResolvedRun(run, 2)).items()}
    tokens = run.layout.micro_batch_size * 128 if run.layout.micro_batch_size else 0
    assert shapes["wq", "wk", "wv"] == (MatmulShape(1, tokens, 64, 128), 12)
    assert shapes["gate", "up"] == (MatmulShape(1, tokens, 192, 128), 8)
    assert shapes["head",] == (MatmulShape(1, tokens, 500, 128), 1)
    assert list(attention_shapes(ResolvedRun(run, 2))) == [
        AttentionShape(batch=2, heads=2, kv_heads=2, queries=128, keys=128, head_dim=32, causal=True, masked=False)
    ]


def test_matmul_shapes_batch_local_experts(tmp_path: Path) -> None:
    run = small_run(TEXT, tmp_path, dry_run_case(2, MOE, ep=2)[1])
    products = {names: product for product, (names, _) in matmul_shapes(ResolvedRun(run, 2)).items()}
    assert products["experts.gate", "experts.up"] == MatmulShape(4, 2 * 128 * 2 // 4, 96, 128)
