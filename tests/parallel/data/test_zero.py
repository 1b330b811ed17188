"""What the parity table does not reach of ZeRO-1 and 2: large models are stepped in several pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from phalanx.parallel.data import zero
from phalanx.parallel.data.zero import ZeRO
from phalanx.spec.chunks import chunk_by_bytes
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from tests.helpers.small_runs import MOE, make_trainer, small_run, train_until, training_trajectory

CHUNK_BYTES_BY_WORLD_SIZE = {2: 52_000, 4: 26_000}
"""By world size: without padding, the last rank's rows would make other pieces than the first's."""
INDIVISIBLE_SHAPE = {"head_dim": 10, "hidden_size": 38, "ffn_hidden_size": 49, "vocab_size": 301}
"""Rows that neither two nor four ranks share evenly."""


def train_with_small_chunks(run: RunSpec) -> tuple[list[tuple[float, float]], int]:
    """The trajectory, and the number of pieces of an update."""
    limit = CHUNK_BYTES_BY_WORLD_SIZE[dist.get_world_size()]
    with patch.object(zero, "PIECE_BYTES", limit):
        under_way = make_trainer(run)
        result = train_until(under_way, run.training.steps)
    assert isinstance(under_way.strategy, ZeRO)
    return result, len(chunk_by_bytes(under_way.strategy.buckets, limit))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("data", ["zero1", "zero2"])
def test_zero_chunked_muon_step_equals_single_process(data: str, world_size: int, text: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model": {**MOE, **INDIVISIBLE_SHAPE}, "optimizer.name": "muon", "training.steps": 6}
    expected = training_trajectory(small_run(text, tmp_path / "one", changes))
    run = small_run(text, tmp_path, {**changes, "layout.data_parallel": data, "layout.bucket_mb": 0.01})
    for result, pieces in rank_pool(world_size).run(train_with_small_chunks, run):
        assert result == [pytest.approx(step, rel=1e-10) for step in expected]
        assert pieces > 3
