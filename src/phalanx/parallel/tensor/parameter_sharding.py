"""Which part of the whole model's tensors this rank has, where ranks share one model: cutting them, and telling where
in the whole a part, its gradient or its optimizer state lies."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from phalanx.parallel.dtensor_shards import as_dtensor, rows_per_rank
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.module_tensors import named_parameters, replace_parameter
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.tensor_sharding import TensorSharding, kv_head_replication, tensor_sharding


class ModelSharding:
    """The shares of tensor- and expert-parallel ranks in a transformer. To data parallelism the model is a smaller one,
    of which it may give ranks some rows."""

    def __init__(self, spec: ModelSpec, layout: Layout, mesh: Mesh) -> None:
        self.spec, self.layout, self.mesh = spec, layout, mesh
        self.shapes: dict[str, torch.Size] = {}
        """Of whole tensors."""
        self._places: dict[tuple[str, DeviceMesh | None], tuple[DeviceMesh, list[Placement]]] = {}
        copies = kv_head_replication(spec, layout.tp) if layout.tp > 1 and layout.tp_attention == "split" else 1
        self._heads: DeviceMesh | None = None
        if 1 < copies < layout.tp and mesh.device_mesh is not None:
            # Every rank makes the groups of all ranks, in the same order.
            shape = (mesh.dims.world_size // layout.tp, layout.tp // copies, copies)
            self._heads = init_device_mesh(
                mesh.device_mesh.device_type, shape, mesh_dim_names=("others", "parts", "same")
            )

    def sharding_of(self, name: str) -> TensorSharding:
        """Of the parameter with this name."""
        return tensor_sharding(self.spec, self.layout, name)

    def shard_parameters(self, module: nn.Module) -> None:
        """Leave of each parameter, still on the meta device, what this rank has of it."""
        for name, whole in list(named_parameters(module)):
            self.shapes[name] = whole.shape
            replace_parameter(module, whole, nn.Parameter(whole.new_empty(self.local_shape(name, whole.shape))))

    def local_shape(self, name: str, whole: torch.Size) -> torch.Size:
        """Of this rank's share of a tensor with the shape `whole`."""
        return self._local_shard(self.sharding_of(name), torch.empty(whole, device="meta")).shape

    def expert_shard(self, name: str, whole: Tensor) -> Tensor:
        """What a rank that has this expert has of it."""
        share = self.sharding_of(name)
        return whole if share.mesh_axis == "ep" else self._local_shard(share, whole[None])[0]

    def _local_shard(self, share: TensorSharding, whole: Tensor) -> Tensor:
        if share.dim is None:
            return whole
        group = self._group(share)
        place = group.rank() // share.replication
        parts = rows_per_rank(whole.shape[share.dim], group.size() // share.replication)
        return whole.narrow(share.dim, sum(parts[:place]), parts[place])

    def as_global_dtensor(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor like the trained parameter `name`, as part of one like the whole: the same memory, as a DTensor."""
        if self.sharding_of(name).dim is None:
            return tensor
        rows = tensor if isinstance(tensor, DTensor) else None
        mesh, placements = self._dtensor_placement(name, rows)
        local = tensor if rows is None else rows._local_tensor
        return as_dtensor(local, mesh, placements, self.shapes[name])

    def gradient_reduce_group(self, name: str) -> dist.ProcessGroup | None:
        """The ranks that each have a term of this parameter's gradient."""
        share = self.sharding_of(name)
        if not share.is_partial_sum:
            return None
        if share.mesh_axis == "ep":  # ranks that share the rows of their state sum the gradients themselves
            sharded = self.layout.data_parallel in ("zero1", "zero2") or self.mesh.data_dims.dp_shard > 1
            return None if sharded else self.mesh.expert_dp_group
        if share.replication == self.layout.tp:
            return self._group(share)
        assert self._heads is not None
        return self._heads["same"].get_group()

    def _dtensor_placement(self, name: str, rows: DTensor | None) -> tuple[DeviceMesh, list[Placement]]:
        """Where the tensor's part lies: first by the share, then by the rows that data parallelism gave this rank."""
        key = name, None if rows is None else rows.device_mesh
        if key not in self._places:
            share = self.sharding_of(name)
            assert share.dim is not None
            outer: dict[str, dist.ProcessGroup] = {share.mesh_axis: self._group(share)}
            if share.replication > 1:
                assert self._heads is not None
                outer = {axis: self._heads[axis].get_group() for axis in ("parts", "same")}
            inner: tuple[str, ...] = ()
            placements: tuple[Placement, ...] = ()
            groups: list[dist.ProcessGroup] = []
            if rows is not None:
                inner, groups = rows.device_mesh.mesh_dim_names or (), rows.device_mesh.get_all_groups()
                placements = rows.placements
            ranks = (
                self._mesh_for(share)[(*inner, share.mesh_axis)]
                .mesh.movedim(-1, 0)
                .unflatten(0, (-1, share.replication))
            )
            ranks = ranks if share.replication > 1 else ranks.squeeze(1)
            mesh = DeviceMesh.from_group(
                [*outer.values(), *groups],
                self._mesh_for(share).device_type,
                ranks.contiguous(),
                mesh_dim_names=(*outer, *inner),
            )
            self._places[key] = mesh, [*(Shard(share.dim), Replicate())[: len(outer)], *placements]
        return self._places[key]

    def _mesh_for(self, share: TensorSharding) -> DeviceMesh:
        """The mesh in which ranks that share something stand."""
        devices = self.mesh.device_mesh if share.mesh_axis == "tp" else self.mesh.ep_mesh
        assert devices is not None
        return devices

    def _group(self, share: TensorSharding) -> dist.ProcessGroup:
        return self._mesh_for(share)[share.mesh_axis].get_group()
