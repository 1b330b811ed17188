"""The ranks of a run as one validated value: the degrees of every axis, and PyTorch's mesh over them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from phalanx.spec.layout import AXES, SHARDED, Degrees, Layout, degrees


@dataclass(frozen=True)
class Mesh:
    """Axes dp_replicate, dp_shard, pp, tp; those of one rank are left out of `devices`. Ranks that share sequences
    stand among the data-parallel ones: to whoever sums gradients they are such."""

    degrees: Degrees
    rank: int
    devices: DeviceMesh | None
    """None for a run of a single process, or with servers."""
    data: Degrees
    """The sizes of its axes."""
    context: DeviceMesh | None = None
    """The ranks that share this rank's sequences."""
    experts: DeviceMesh | None = None
    """The ranks of this rank's stages as its experts see them: dp_replicate and dp_shard, of those with the same
    experts, and ep, of those with different ones; the first two may be left out where they have one rank."""
    returning: DeviceMesh | None = None
    """The same ranks in groups of their own, for what goes back in a pipeline: NCCL wants the sends and receives of two
    ranks in one order on both, which holds for each direction. Gloo, which has tags, has no need of it."""

    @property
    def dp_rank(self) -> int:
        """Which share of the data this rank reads, from 0 to degrees.dp - 1; a server reads none, but is given one."""
        place = self.degrees.place(self.rank)
        return place["dp_replicate"] * self.degrees.dp_shard + place["dp_shard"]

    @property
    def pp_rank(self) -> int:
        """Where in the pipeline this rank is."""
        return self.degrees.place(self.rank)["pp"]

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The ranks that share this rank's matrix products."""
        mesh = self.axes("tp")
        return None if mesh is None else mesh.get_group()

    @property
    def links(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """The groups of this rank's pipeline: for messages to later ranks of it, and to earlier ones."""
        assert self.devices is not None
        back = self.devices if self.returning is None else self.returning
        return self.devices["pp"].get_group(), back["pp"].get_group()

    @property
    def same_experts(self) -> DeviceMesh | None:
        """The ranks with the same experts of the same stages; None if this one is alone."""
        names = tuple(name for name in (self.experts.mesh_dim_names or ()) if name != "ep") if self.experts else ()
        return self.experts[names] if self.experts is not None and names else None

    @cached_property
    def same_experts_group(self) -> dist.ProcessGroup | None:
        """These ranks as one group."""
        mesh = self.same_experts
        if mesh is None:
            return None
        return (mesh._flatten("same_experts") if mesh.ndim > 1 else mesh).get_group()

    def axes(self, *names: str) -> DeviceMesh | None:
        """The submesh over those of the named axes that have more than one rank; None if none has."""
        present = tuple(name for name in names if getattr(self.data, name) > 1)
        return self.devices[present] if self.devices is not None and present else None

    @cached_property
    def dp_group(self) -> dist.ProcessGroup | None:
        """The ranks that read different data, or other tokens of it, for the same share of the model; and servers."""
        if self.degrees.servers:
            return dist.group.WORLD
        return self._flat("dp", "dp_replicate", "dp_shard")

    @cached_property
    def loss_group(self) -> dist.ProcessGroup | None:
        """The ranks that each compute a part of what is summed up to the loss."""
        if self.degrees.pp == 1:
            return self.dp_group
        return self._flat("loss", "dp_replicate", "dp_shard", "pp")

    def _flat(self, name: str, *axes: str) -> dist.ProcessGroup | None:
        """One group over these axes."""
        mesh = self.axes(*axes)
        if mesh is None:
            return None
        return (mesh._flatten(name) if mesh.ndim > 1 else mesh).get_group()


def build_mesh(layout: Layout, world_size: int, device_type: str) -> Mesh:
    """The mesh of `layout`; torch.distributed must be initialised where world_size > 1.

    Raises UserError if the ranks cannot be divided so.
    """
    sizes = degrees(layout, world_size)
    data = sizes.as_data(sharded=layout.data in SHARDED)
    if world_size == 1 or sizes.servers:  # what servers and their workers send has no axes
        return Mesh(sizes, dist.get_rank() if world_size > 1 else 0, None, data)
    # dp_replicate, dp_shard, pp, cp, tp, and then cp beside the data-parallel axis that it belongs to
    ranks = torch.arange(world_size).view([getattr(sizes, axis) for axis in sizes.axes])
    ranks = ranks.permute([sizes.axes.index(axis) for axis in AXES])
    beside = ranks.permute(0, 1, 3, 2, 4) if layout.data in SHARDED else ranks.permute(0, 3, 1, 2, 4)
    present = {axis: size for axis in AXES if (size := getattr(data, axis)) > 1}
    arranged = beside.reshape(list(present.values()))
    make = partial(DeviceMesh, device_type, arranged, mesh_dim_names=tuple(present))
    context = None
    if sizes.cp > 1:
        in_rows = ranks.movedim(3, -1).reshape(-1, sizes.cp)
        context = DeviceMesh(device_type, in_rows, mesh_dim_names=("others", "cp"))["cp"]
    experts = None
    if sizes.ep > 1:
        by_stage = ranks.movedim(2, 0).flatten(1)
        same = by_stage.shape[1] // sizes.ep
        replicate = {"ddp": same, "hsdp": sizes.dp_replicate}.get(layout.data, 1)
        shape = {"stages": sizes.pp, "dp_replicate": replicate, "dp_shard": same // replicate, "ep": sizes.ep}
        # What is split over ranks is so also where there is one: parameters of one kind are stepped together.
        needed = ("stages", "ep", "dp_shard") if layout.data in SHARDED else ("stages", "ep")
        kept = {axis: size for axis, size in shape.items() if size > 1 or axis in needed}
        whole = DeviceMesh(device_type, by_stage.reshape(list(kept.values())), mesh_dim_names=tuple(kept))
        experts = whole[tuple(axis for axis in kept if axis != "stages")]
    back = device_type != "cpu" and sizes.pp > 1
    return Mesh(sizes, dist.get_rank(), make(), data, context, experts, make() if back else None)
