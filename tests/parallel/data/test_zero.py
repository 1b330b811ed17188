"""What the parity table does not reach of ZeRO-1 and 2: large models are stepped in several pieces, and bf16 gradients
of many micro-batches are added up in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from phalanx.parallel.data import zero
from phalanx.parallel.data.offload import CpuOffload, DiskOffload
from phalanx.parallel.data.zero import ZeRO
from phalanx.parallel.dtensor_shards import local_tensor
from phalanx.spec.chunks import chunk_by_bytes
from phalanx.spec.layout import Layout
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


def summed_gradient_errors(stage: str, offload: bool, in_pipeline: bool) -> list[float]:
    """The relative errors of a bf16 layer's gradient, summed over 64 micro-batches, in each of two steps."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    x_NBD = torch.rand(64, ranks, 16, 24).bfloat16()
    layer, cpu = nn.Linear(24, 32, bias=False), torch.device("cpu")
    mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None
    layout = Layout.model_validate({"data_parallel": stage})
    strategy = ZeRO(layer, layout, mesh, cpu, torch.bfloat16, CpuOffload() if offload else None)
    errors = []
    for _ in range(2):
        strategy.zero_grad()
        micro_batches = [x_BD[rank] for x_BD in x_NBD]
        if in_pipeline:
            with strategy.accumulate(last=False):
                for x_BD in micro_batches:
                    layer(x_BD).square().sum().backward()
            strategy.finalize_gradients()
        else:
            for index, x_BD in enumerate(micro_batches):
                with strategy.accumulate(last=index == len(micro_batches) - 1):
                    layer(x_BD).square().sum().backward()
        rows = local_tensor(strategy.gradients()["weight"]).double()
        x_MD = x_NBD.flatten(0, 2).double()
        expected = (2 * (x_MD @ layer.weight.detach().double().T)).T @ x_MD
        own = expected.chunk(ranks)[rank]
        errors.append(((rows - own).norm() / own.norm()).item())
    return errors


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("stage", "offload", "in_pipeline"),
    [
        ("zero1", False, False),
        ("zero1", False, True),
        ("zero1", True, False),
        ("zero2", False, False),
        ("zero2", True, False),
    ],
)
def test_bf16_gradients_of_many_micro_batches_sum_in_fp32(
    stage: str, offload: bool, in_pipeline: bool, world_size: int
) -> None:
    for errors in rank_pool(world_size).run(summed_gradient_errors, stage, offload, in_pipeline):
        assert max(errors) < 3e-3  # summed in bf16: 8e-3 to 1e-2


def count_files_after_many_micro_batches(directory: Path) -> int:
    """Train two steps of 12 micro-batches with state in files; return the number of files of a weight's rows."""
    layer, cpu = nn.Linear(128, 512, bias=False), torch.device("cpu")
    offload = DiskOffload(directory)
    strategy = ZeRO(layer, Layout(data_parallel="zero2"), None, cpu, torch.bfloat16, offload)
    for _ in range(2):
        strategy.zero_grad()
        for index in range(12):
            with strategy.accumulate(last=index == 11):
                layer(torch.ones(1, 128, dtype=torch.bfloat16)).sum().backward()
    return len(offload.files)


def test_gradient_on_disk_that_widens_to_fp32_leaves_one_file(tmp_path: Path) -> None:
    """Of the master rows and of their gradient, however it was summed before."""
    assert rank_pool(1).run(count_files_after_many_micro_batches, tmp_path) == [2]
