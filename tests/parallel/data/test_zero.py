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
from tests.helpers.small_runs import MOE, described, steps, trainer, trajectory

PIECE_BYTES = {2: 52_000, 4: 26_000}
"""By world size: without padding, the last rank's rows would make other pieces than the first's."""
ODD = {"head_dim": 10, "hidden_size": 38, "ffn_hidden_size": 49, "vocab_size": 301}
"""Rows that neither two nor four ranks share evenly."""


def in_pieces(run: RunSpec) -> tuple[list[tuple[float, float]], int]:
    """The trajectory, and the number of pieces of an update."""
    limit = PIECE_BYTES[dist.get_world_size()]
    with patch.object(zero, "PIECE_BYTES", limit):
        under_way = trainer(run)
        result = steps(under_way, run.training.steps)
    assert isinstance(under_way.strategy, ZeRO)
    return result, len(chunk_by_bytes(under_way.strategy.buckets, limit))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("data", ["zero1", "zero2"])
def test_zero_chunked_muon_step_equals_single_process(data: str, world_size: int, text: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model": {**MOE, **ODD}, "optimizer.name": "muon", "training.steps": 6}
    expected = trajectory(described(text, tmp_path / "one", changes))
    run = described(text, tmp_path, {**changes, "layout.data_parallel": data, "layout.bucket_mb": 0.01})
    for result, pieces in rank_pool(world_size).run(in_pieces, run):
        assert result == [pytest.approx(step, rel=1e-10) for step in expected]
        assert pieces > 3
