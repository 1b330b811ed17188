"""Sharding of the model's tensors over ranks that share one model.

Shards tensors, and maps a shard, its gradient or its optimizer state to its position in the full tensor.

Why: `docs/design/decisions/smaller-model.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from phalanx.parallel.dtensor_shards import as_dtensor, rows_per_rank
from phalanx.parallel.mesh import Mesh, make_device_mesh
from phalanx.parallel.module_tensors import named_modules
from phalanx.spec.layout import ZERO_STRATEGIES, Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.tensor_sharding import TensorSharding, head_replications, parameter_shardings


@dataclass(frozen=True)
class MeshAxis:
    """An axis of a DTensor's mesh."""

    name: str
    group: dist.ProcessGroup
    """The ranks of this rank's line along the axis."""
    placement: Placement


class ModelSharding:
    """The shards of tensor- and expert-parallel ranks in a transformer.

    For data parallelism the model is a smaller one, which it may shard further by rows."""

    def __init__(self, spec: ModelSpec, layout: Layout, mesh: Mesh) -> None:
        self.spec = spec
        self.layout = layout
        self.mesh = mesh
        self._shardings = parameter_shardings(spec, layout)
        self.shapes: dict[str, torch.Size] = {}
        """Shapes of full tensors by name."""
        self._placements: dict[object, tuple[DeviceMesh, list[Placement]]] = {}
        """Meshes and placements of DTensors, by sharding and by the mesh and placements of rows."""
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._head_meshes: dict[int, DeviceMesh] = {}
        """Meshes of the ranks with copies of heads, by the number of copies."""
        for replication in head_replications(spec, layout.tp):
            if mesh.device_mesh is None or replication in (1, layout.tp):
                continue
            # Every rank makes the groups of all ranks, in the same order.
            world = torch.arange(mesh.dims.world_size, device="cpu")  # the model is made on the meta device
            rank_grid = world.view(-1, layout.tp // replication, replication)
            names = ("others", "parts", "same")
            self._head_meshes[replication] = make_device_mesh(mesh.device_mesh.device_type, rank_grid, names)

    def sharding_of(self, name: str) -> TensorSharding:
        """Return the sharding of the parameter with this name."""
        return self._shardings[name]

    def shard_parameters(self, module: nn.Module) -> None:
        """Replace each parameter, still on the meta device, by this rank's shard."""
        for prefix, part in named_modules(module):
            for key, parameter in part.named_parameters(recurse=False):
                name = f"{prefix}.{key}" if prefix else key
                self.shapes[name] = parameter.shape
                shard = parameter.new_empty(self.local_shape(name, parameter.shape))
                part.register_parameter(key, nn.Parameter(shard, parameter.requires_grad))

    def local_shape(self, name: str, global_shape: torch.Size) -> torch.Size:
        """Return the shape of this rank's shard of a tensor with the shape `global_shape`."""
        return self._local_shard(self.sharding_of(name), torch.empty(global_shape, device="meta")).shape

    def largest_shape(self, name: str) -> torch.Size:
        """Return the shape of the largest shard of the parameter `name` on any rank."""
        sharding = self.sharding_of(name)
        shape = list(self.shapes[name])
        if sharding.dim is not None:
            shape[sharding.dim] = rows_per_rank(shape[sharding.dim], self._num_parts(sharding))[0]
        return torch.Size(shape)

    def expert_shard(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's shard of one of its experts; `full` is the full expert."""
        sharding = self.sharding_of(name)
        return full if sharding.mesh_axis == "ep" else self._local_shard(sharding, full[None])[0]

    def _local_shard(self, sharding: TensorSharding, full: Tensor) -> Tensor:
        if sharding.dim is None:
            return full
        index = self._group(sharding).rank() // sharding.replication
        parts = rows_per_rank(full.shape[sharding.dim], self._num_parts(sharding))
        return full.narrow(sharding.dim, sum(parts[:index]), parts[index])

    def as_global_dtensor(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor like the trained parameter `name` as a DTensor of the full shape (shared memory)."""
        if self.sharding_of(name).dim is None:
            return tensor
        rows = tensor if isinstance(tensor, DTensor) else None
        mesh, placements = self._dtensor_placement(name, rows)
        local = tensor if rows is None else rows._local_tensor
        return as_dtensor(local, mesh, placements, shape=self.shapes[name])

    def gradient_reduce_group(self, name: str) -> dist.ProcessGroup | None:
        """Return the group over which this parameter's gradient must be summed; None if there is none."""
        sharding = self.sharding_of(name)
        if not sharding.is_partial_sum:
            return None
        if sharding.mesh_axis == "ep":  # ZeRO and FSDP ranks with sharded state sum the gradients themselves
            is_zero = self.layout.data_parallel in ZERO_STRATEGIES or self.layout.offload != "none"
            sharded = is_zero or self.mesh.data_dims.dp_shard > 1
            return None if sharded else self.mesh.expert_dp_group
        if sharding.replication == self.layout.tp:
            return self._group(sharding)
        return self._head_meshes[sharding.replication]["same"].get_group()

    def _dtensor_placement(self, name: str, rows: DTensor | None) -> tuple[DeviceMesh, list[Placement]]:
        """Return the mesh and placements of a shard: first by model sharding, then by data-parallel rows.

        Example: keys of two heads with tp = 4, so that two ranks have copies of each head, and zero3 over two ranks.

            ranks [dp_shard, tp]     0 1 2 3     parts: tp ranks {0, 1} and {2, 3} have one head each
                                     4 5 6 7     same:  both ranks of a part have a copy

            mesh [parts, same, dp_shard] = [[[0, 4], [1, 5]], [[2, 6], [3, 7]]]
            placements                   = [Shard(0), Replicate(), Shard(0)]

        Ranks 2 and 3 have the first half of the second head, ranks 6 and 7 the second half.

        Args:
            name: Name of the parameter.
            rows: The shard as FSDP or ZeRO splits it further; None if they do not.
        """
        sharding = self.sharding_of(name)
        key = sharding, None if rows is None else (rows.device_mesh, rows.placements)
        if key not in self._placements:
            outer = self._sharding_axes(sharding)
            inner = _fsdp_axes(rows)
            mesh = self._combine_meshes(sharding, outer, inner)
            self._placements[key] = mesh, [axis.placement for axis in (*outer, *inner)]
        return self._placements[key]

    def _sharding_axes(self, sharding: TensorSharding) -> list[MeshAxis]:
        """Return the axes on which model-parallel ranks have the parts of a tensor, and the copies of a part."""
        assert sharding.dim is not None
        if sharding.replication == 1:
            return [MeshAxis(sharding.mesh_axis, self._group(sharding), Shard(sharding.dim))]
        heads = self._head_meshes[sharding.replication]
        return [
            MeshAxis("parts", heads["parts"].get_group(), Shard(sharding.dim)),
            MeshAxis("same", heads["same"].get_group(), Replicate()),
        ]

    def _combine_meshes(
        self, sharding: TensorSharding, outer: Sequence[MeshAxis], inner: Sequence[MeshAxis]
    ) -> DeviceMesh:
        """Return the mesh with the axes of `outer`, then those of `inner`, of groups that exist."""
        axes = [*outer, *inner]
        mesh = self._mesh_for(sharding)
        ranks = mesh[(*(axis.name for axis in inner), sharding.mesh_axis)].mesh.movedim(-1, 0)
        if sharding.replication > 1:
            ranks = ranks.unflatten(0, (-1, sharding.replication))
        return DeviceMesh.from_group(
            [axis.group for axis in axes],
            mesh.device_type,
            ranks.contiguous(),
            mesh_dim_names=tuple(axis.name for axis in axes),
        )

    def _mesh_for(self, sharding: TensorSharding) -> DeviceMesh:
        """Return the mesh of the ranks that share a tensor."""
        devices = self.mesh.device_mesh if sharding.mesh_axis == "tp" else self.mesh.ep_mesh
        assert devices is not None
        return devices

    def _num_parts(self, sharding: TensorSharding) -> int:
        """Return the number of different shards of a tensor."""
        return self._group(sharding).size() // sharding.replication

    def _group(self, sharding: TensorSharding) -> dist.ProcessGroup:
        axis = sharding.mesh_axis
        if axis not in self._groups:  # PyTorch makes a mesh for the axis, which takes time for every parameter
            self._groups[axis] = self._mesh_for(sharding)[axis].get_group()
        return self._groups[axis]


def _fsdp_axes(rows: DTensor | None) -> list[MeshAxis]:
    """Return the axes on which data-parallel ranks have the rows of a shard; none if it is not split further."""
    if rows is None:
        return []
    mesh = rows.device_mesh
    names = mesh.mesh_dim_names or ()
    return [MeshAxis(*axis) for axis in zip(names, mesh.get_all_groups(), rows.placements, strict=True)]
