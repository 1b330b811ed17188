"""Memory and traffic of runs with a chunked loss, compared with the prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.plan.predicted_vs_measured import PARTS, STATE, TOTAL, compare_with_prediction
from phalanx.spec import chunks
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from tests.helpers.small_runs import DENSE, measure_steady_step, small_run

MODEL = {**DENSE, "hidden_size": 64, "ffn_hidden_size": 128, "num_layers": 4, "max_seq_len": 256, "vocab_size": 4096}
SETTINGS = {
    "model": MODEL,
    "training.seq_len": 256,
    "data.mask_documents": False,
    "layout.micro_batch_size": 2,
    "cluster.device": "cpu",
}
CHUNK_ROWS = 100
RUNS: list[tuple[int, str, dict[str, Any]]] = [
    (1, "fp32", {}),
    (2, "bf16", {"layout.data_parallel": "ddp"}),
    (2, "bf16", {"layout.data_parallel": "zero2"}),
    (2, "fp32", {"layout.data_parallel": "zero3"}),
    (2, "bf16", {"layout.tp": 2}),
    (2, "fp32", {"layout.tp": 2, "layout.sequence_parallel": False}),
    (2, "fp32", {"layout.pp": 2, "layout.schedule": "gpipe"}),
    (2, "fp32", {"layout.pp": 2, "layout.schedule": "zb-h1"}),
    (2, "bf16", {"layout.data_parallel": "zero1", "layout.activation_checkpointing": "full"}),
]


def limit_chunks(patch: pytest.MonkeyPatch, run: RunSpec) -> None:
    logit_bytes = {"bf16": 2, "fp32": 4}[run.training.precision]
    patch.setattr(chunks, "LOGITS_CHUNK_BYTES", CHUNK_ROWS * logit_bytes * run.model.vocab_size // run.layout.tp)


def measure_in_chunks(run: RunSpec) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        limit_chunks(patch, run)
        return measure_steady_step(run)


@pytest.mark.parametrize(("world_size", "precision", "changes"), RUNS, ids=str)
def test_memory_and_traffic_match_prediction_with_chunked_loss(
    world_size: int,
    precision: str,
    changes: dict[str, Any],
    documents: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sequences = 8 if "layout.pp" in changes else 4
    settings = {"training.precision": precision, "training.tokens_per_step": sequences * 256}
    run = small_run(documents, tmp_path, {**SETTINGS, **settings, **changes})
    measured = rank_pool(world_size).run(measure_in_chunks, run) if world_size > 1 else [measure_in_chunks(run)]
    limit_chunks(monkeypatch, run)
    for row in compare_with_prediction(ResolvedRun(run, world_size), dict(enumerate(measured))):
        if row.quantity in STATE:
            assert row.measured == row.predicted, row
        elif row.quantity == TOTAL:
            assert row.measured == pytest.approx(row.predicted, rel=0.03), row
        elif row.quantity not in (*PARTS, "working"):
            assert row.measured == pytest.approx(row.predicted, rel=0.01), row
