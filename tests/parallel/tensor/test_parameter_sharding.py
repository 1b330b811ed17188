"""Placement of a tensor's parts over model-parallel and data-parallel ranks together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from phalanx.parallel.mesh import build_mesh
from phalanx.parallel.tensor.parameter_sharding import ModelSharding
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from tests.helpers.small_runs import DENSE


@pytest.fixture
def fake_world() -> Iterator[None]:
    """Make this process rank 6 of eight; the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=6, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_world")
def test_copies_of_key_heads_and_their_zero3_rows_form_one_mesh() -> None:
    spec = ModelSpec(**{**DENSE, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4})
    layout = Layout(tp=4, data_parallel="zero3")
    mesh = build_mesh(layout, 8, "cpu")
    sharding = ModelSharding(spec, layout, mesh)
    name = "blocks.0.attention.wk.weight"
    sharding.shapes[name] = torch.Size([8, 2])
    local_rows = torch.zeros(2, 2)
    rows = DTensor.from_local(local_rows, mesh.submesh("dp_replicate", "dp_shard"), [Shard(0)], run_check=False)
    part = sharding.as_global_dtensor(name, rows)
    assert isinstance(part, DTensor)
    assert part.device_mesh.mesh.tolist() == [[[0, 4], [1, 5]], [[2, 6], [3, 7]]]
    assert part.device_mesh.mesh_dim_names == ("parts", "same", "dp_shard")
    assert part.placements == (Shard(0), Replicate(), Shard(0))
    assert part.shape == (8, 2)
    assert part.to_local().data_ptr() == local_rows.data_ptr()
