"""Which part of the whole model's tensors this rank has, where ranks share one model: cutting them, and telling where
in the whole a part, its gradient or its optimizer state lies."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from phalanx.parallel.mesh import Mesh
from phalanx.parallel.parts import as_part, rows_of_ranks
from phalanx.parallel.strategy import named_parameters, rebind
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.share import Share, kv_copies, tensor_share


class Shares:
    """The shares of tensor- and expert-parallel ranks in a transformer. To data parallelism the model is a smaller one,
    of which it may give ranks some rows."""

    def __init__(self, spec: ModelSpec, layout: Layout, mesh: Mesh) -> None:
        self.spec, self.layout, self.mesh = spec, layout, mesh
        self.shapes: dict[str, torch.Size] = {}
        """Of whole tensors."""
        self._places: dict[tuple[str, DeviceMesh | None], tuple[DeviceMesh, list[Placement]]] = {}
        copies = kv_copies(spec, layout.tp) if layout.tp > 1 and layout.heads == "split" else 1
        self._heads: DeviceMesh | None = None
        if 1 < copies < layout.tp and mesh.devices is not None:
            # Every rank makes the groups of all ranks, in the same order.
            shape = (mesh.degrees.world_size // layout.tp, layout.tp // copies, copies)
            self._heads = init_device_mesh(mesh.devices.device_type, shape, mesh_dim_names=("others", "parts", "same"))

    def share(self, name: str) -> Share:
        """Of the parameter with this name."""
        return tensor_share(self.spec, self.layout, name)

    def cut(self, module: nn.Module) -> None:
        """Leave of each parameter, still on the meta device, what this rank has of it."""
        for name, whole in list(named_parameters(module)):
            self.shapes[name] = whole.shape
            rebind(module, whole, nn.Parameter(whole.new_empty(self.shape(name, whole.shape))))

    def shape(self, name: str, whole: torch.Size) -> torch.Size:
        """Of this rank's share of a tensor with the shape `whole`."""
        return self._mine(self.share(name), torch.empty(whole, device="meta")).shape

    def of_expert(self, name: str, whole: Tensor) -> Tensor:
        """What a rank that has this expert has of it."""
        share = self.share(name)
        return whole if share.among == "ep" else self._mine(share, whole[None])[0]

    def _mine(self, share: Share, whole: Tensor) -> Tensor:
        if share.axis is None:
            return whole
        group = self._group(share)
        place = group.rank() // share.copies
        parts = rows_of_ranks(whole.shape[share.axis], group.size() // share.copies)
        return whole.narrow(share.axis, sum(parts[:place]), parts[place])

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor like the trained parameter `name`, as part of one like the whole: the same memory, as a DTensor."""
        if self.share(name).axis is None:
            return tensor
        rows = tensor if isinstance(tensor, DTensor) else None
        mesh, placements = self._place(name, rows)
        local = tensor if rows is None else rows._local_tensor
        return as_part(local, mesh, placements, self.shapes[name])

    def summed_over(self, name: str) -> dist.ProcessGroup | None:
        """The ranks that each have a term of this parameter's gradient."""
        share = self.share(name)
        if not share.partial:
            return None
        if share.among == "ep":  # ranks that share the rows of their state sum the gradients themselves
            sharded = self.layout.data in ("zero1", "zero2") or self.mesh.data.dp_shard > 1
            return None if sharded else self.mesh.same_experts_group
        if share.copies == self.layout.tp:
            return self._group(share)
        assert self._heads is not None
        return self._heads["same"].get_group()

    def _place(self, name: str, rows: DTensor | None) -> tuple[DeviceMesh, list[Placement]]:
        """Where the tensor's part lies: first by the share, then by the rows that data parallelism gave this rank."""
        key = name, None if rows is None else rows.device_mesh
        if key not in self._places:
            share = self.share(name)
            assert share.axis is not None
            outer: dict[str, dist.ProcessGroup] = {share.among: self._group(share)}
            if share.copies > 1:
                assert self._heads is not None
                outer = {axis: self._heads[axis].get_group() for axis in ("parts", "same")}
            inner: tuple[str, ...] = ()
            placements: tuple[Placement, ...] = ()
            groups: list[dist.ProcessGroup] = []
            if rows is not None:
                inner, groups = rows.device_mesh.mesh_dim_names or (), rows.device_mesh.get_all_groups()
                placements = rows.placements
            ranks = self._devices(share)[(*inner, share.among)].mesh.movedim(-1, 0).unflatten(0, (-1, share.copies))
            ranks = ranks if share.copies > 1 else ranks.squeeze(1)
            mesh = DeviceMesh.from_group(
                [*outer.values(), *groups], self._devices(share).device_type, ranks.contiguous(),
                mesh_dim_names=(*outer, *inner),
            )  # fmt: skip
            self._places[key] = mesh, [*(Shard(share.axis), Replicate())[: len(outer)], *placements]
        return self._places[key]

    def _devices(self, share: Share) -> DeviceMesh:
        """The mesh in which ranks that share something stand."""
        devices = self.mesh.devices if share.among == "tp" else self.mesh.experts
        assert devices is not None
        return devices

    def _group(self, share: Share) -> dist.ProcessGroup:
        return self._devices(share)[share.among].get_group()
