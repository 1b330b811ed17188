"""Groups of ranks on GPUs: gloo for the whole world only, and few channels for messages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.parallel.mesh import Mesh, build_mesh
from phalanx.spec.communication_groups import MAX_PIPELINE_CHANNELS
from phalanx.spec.layout import Layout

RANKS = 8
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def rank_0_of_8() -> Iterator[None]:
    """Initialize a process group whose CPU backend replaces gloo and connects to no other rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.cuda.set_device(0)
    dist.init_process_group("cpu:fake,cuda:nccl", store=FakeStore(), rank=0, world_size=RANKS)  # type: ignore[no-untyped-call]
    yield
    dist.destroy_process_group()


def groups_with_cpu_backend() -> list[list[int]]:
    """Return the ranks of each group with a CPU backend."""
    world: Any = dist.distributed_c10d._world  # type: ignore[attr-defined]
    groups = [group for group in world.pg_map if "cpu" in [device.type for device in group._device_types]]
    return [dist.get_process_group_ranks(group) for group in groups]


def make_all_groups(mesh: Mesh) -> None:
    assert [mesh.dp_group, mesh.loss_group, mesh.expert_dp_group]


@pytest.mark.parametrize(
    "layout",
    [
        {"data_parallel": "zero3"},
        {"data_parallel": "hsdp", "dp_shard": 4},
        {"pp": 2, "tp": 2, "ep": 2, "data_parallel": "zero1"},
        {"pp": 2, "cp": 2, "ep": 4, "data_parallel": "zero3"},
        {"ep": 2, "tp": 2, "data_parallel": "hsdp", "dp_shard": 2},
    ],
    ids=str,
)
def test_groups_of_axes_are_for_gpu_tensors_alone(layout: Any) -> None:
    make_all_groups(build_mesh(Layout(**layout), RANKS, "cuda"))
    assert groups_with_cpu_backend() == [list(range(RANKS))]


@pytest.mark.parametrize("pp", [2, RANKS])
def test_pipeline_groups_have_few_channels(pp: int) -> None:
    mesh = build_mesh(Layout(pp=pp), RANKS, "cuda")
    forward, backward = mesh.pipeline_groups
    assert dist.get_process_group_ranks(forward) == dist.get_process_group_ranks(backward)
    assert len({forward.group_name, backward.group_name, dist.group.WORLD.group_name}) == 3
    for group in (forward, backward):
        options: Any = group._get_backend(GPU).options
        assert options.config.max_ctas == MAX_PIPELINE_CHANNELS
        assert options._timeout == dist.distributed_c10d.default_pg_nccl_timeout  # type: ignore[attr-defined]
    gradients: Any = mesh.dp_group or dist.group.WORLD
    assert gradients._get_backend(GPU).options.config.max_ctas < 0  # NCCL's own choice
