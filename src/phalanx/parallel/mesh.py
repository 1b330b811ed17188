"""Device mesh of a run: the size of every parallel axis, and PyTorch's mesh over the ranks.

Why: `docs/design/decisions/context-ranks.md` and `docs/design/decisions/expert-data-parallel.md`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from phalanx.parallel.comm.collectives import sends_gpu_tensors
from phalanx.parallel.comm.objects import rank_and_world_size
from phalanx.spec.communication_groups import MAX_PIPELINE_CHANNELS
from phalanx.spec.layout import SHARDED_STRATEGIES, Layout
from phalanx.spec.parallel_dims import AXES, ParallelDims, parallel_dims


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The position of this rank on the axes of the mesh (`AXES`, outermost first), and its process groups.

    `device_mesh` has no axes of size one. Context-parallel ranks count as data-parallel ranks, because their gradients
    are summed in the same way."""

    dims: ParallelDims
    rank: int
    device_mesh: DeviceMesh | None
    """None for a run of a single process, or with parameter servers."""
    data_dims: ParallelDims
    """The sizes of the axes of `device_mesh`."""
    cp_mesh: DeviceMesh | None = None
    """The ranks that share this rank's sequences."""
    ep_mesh: DeviceMesh | None = None
    """The ranks of this rank's stages, as axes for its experts.

    The ranks on dp_replicate and dp_shard have the same experts, the ranks on ep have different ones. The first two
    axes may be absent where their size is one."""
    backward_p2p_group: dist.ProcessGroup | None = None
    """The ranks of this rank's pipeline in a second group, for gradients.

    NCCL runs the sends and receives of two ranks in one group in the order of the calls. That order is equal on both
    ranks only within one direction. None with gloo, which matches messages by tag."""
    dp_group: dist.ProcessGroup | None = None
    """The ranks with the same share of the model and different data or tokens. With parameter servers, all ranks."""
    loss_group: dist.ProcessGroup | None = None
    """The ranks that each compute a part of the summed loss: data-parallel ranks and the pipelines' stages."""
    expert_dp_group: dist.ProcessGroup | None = None
    """The ranks of `expert_dp_mesh` as one group."""

    @property
    def dp_rank(self) -> int:
        """Index of the share of the data that this rank reads, from 0 to dp_size - 1; unused on a server."""
        coordinates = self.dims.coordinates(self.rank)
        return coordinates["dp_replicate"] * self.dims.dp_shard + coordinates["dp_shard"]

    @property
    def pp_rank(self) -> int:
        """The index of this rank in its pipeline."""
        return self.dims.coordinates(self.rank)["pp"]

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The ranks that share this rank's matrix products."""
        mesh = self.submesh("tp")
        return None if mesh is None else mesh.get_group()

    @property
    def pipeline_groups(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """The groups for messages to later ranks of this rank's pipeline, and to earlier ranks."""
        assert self.device_mesh is not None
        forward_group = self.device_mesh["pp"].get_group()
        return forward_group, self.backward_p2p_group or forward_group

    @property
    def expert_dp_mesh(self) -> DeviceMesh | None:
        """The ranks with the same experts of the same stages; None if this rank is the only one."""
        if self.ep_mesh is None:
            return None
        names = tuple(name for name in self.ep_mesh.mesh_dim_names or () if name != "ep")
        return self.ep_mesh[names] if names else None

    def submesh(self, *names: str) -> DeviceMesh | None:
        """Return the submesh over the named axes of more than one rank, or None without such axes."""
        present = tuple(name for name in names if getattr(self.data_dims, name) > 1)
        return self.device_mesh[present] if self.device_mesh is not None and present else None


def current_device() -> torch.device:
    """Return the device of this rank: its current GPU, or the CPU if there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def build_mesh(layout: Layout, world_size: int | None = None, device_type: str | None = None) -> Mesh:
    """Build the device mesh of a layout. A collective: every rank must call it.

    Args:
        layout: The parallel degrees.
        world_size: The number of ranks. By default that of torch.distributed, or 1 if it is not initialized.
        device_type: "cpu" or "cuda". By default "cuda" if there is a GPU.

    Returns:
        The mesh: the coordinates of this rank and its process groups.

    Raises:
        UserError: The degrees of the layout do not divide the number of ranks.

    Example:
        >>> mesh = phalanx.build_mesh(phalanx.Layout(data_parallel="zero1"))
        >>> mesh.rank, mesh.dims.world_size, mesh.dims.dp_size
        (0, 1, 1)
        >>> phalanx.build_mesh(phalanx.Layout(tp=2))
        Traceback (most recent call last):
        phalanx.spec.errors.UserError: ..."""
    world_size = rank_and_world_size()[1] if world_size is None else world_size
    device_type = current_device().type if device_type is None else device_type
    sizes = parallel_dims(layout, world_size)
    data = sizes.with_cp_as_data_parallel(layout)
    # Servers and workers communicate without mesh axes.
    if world_size == 1 or sizes.servers:
        world = dist.group.WORLD if sizes.servers else None
        rank = dist.get_rank() if world_size > 1 else 0
        return Mesh(dims=sizes, rank=rank, device_mesh=None, data_dims=data, dp_group=world, loss_group=world)
    grid = rank_grid(sizes)
    # cp joins the data-parallel axis that sums gradients.
    is_sharded = layout.data_parallel in SHARDED_STRATEGIES
    data_axes = ("dp_replicate", "dp_shard", "cp") if is_sharded else ("dp_replicate", "cp", "dp_shard")
    data_sizes = {axis: getattr(data, axis) for axis in AXES if getattr(data, axis) > 1}
    data_grid = _permute_axes(grid, *data_axes, "pp", "tp").reshape(list(data_sizes.values()))
    device_mesh = make_device_mesh(device_type, data_grid, tuple(data_sizes))
    cp_mesh = None
    if sizes.cp > 1:
        cp_grid = _permute_axes(grid, "dp_replicate", "dp_shard", "pp", "tp", "cp").reshape(-1, sizes.cp)
        cp_mesh = make_device_mesh(device_type, cp_grid, ("others", "cp"))["cp"]
    ep_mesh = _build_expert_mesh(layout, sizes, grid, device_type) if sizes.ep > 1 else None
    backward_p2p_group = None
    if sizes.pp > 1 and _needs_gpu_groups(device_type):
        pipelines = _permute_axes(grid, "dp_replicate", "dp_shard", "cp", "tp", "pp").reshape(-1, sizes.pp)
        backward_p2p_group = new_pipeline_group(pipelines.tolist())
    mesh = Mesh(
        dims=sizes,
        rank=dist.get_rank(),
        device_mesh=device_mesh,
        data_dims=data,
        cp_mesh=cp_mesh,
        ep_mesh=ep_mesh,
        backward_p2p_group=backward_p2p_group,
    )
    # Groups over several axes.
    dp_group = _flatten_to_group(mesh.submesh("dp_replicate", "dp_shard"), "dp")
    loss_group = dp_group
    if sizes.pp > 1:
        loss_group = _flatten_to_group(mesh.submesh("dp_replicate", "dp_shard", "pp"), "loss")
    expert_dp_group = _flatten_to_group(mesh.expert_dp_mesh, "same_experts")
    return replace(mesh, dp_group=dp_group, loss_group=loss_group, expert_dp_group=expert_dp_group)


def rank_grid(sizes: ParallelDims) -> Tensor:
    """Return the global ranks by their coordinates on AXES.

    `sizes.axes` has the axes from the outermost to the innermost, whose ranks are neighbors. The groups of a mesh are
    rows of this grid after a permutation of its axes. For dp_shard 2, cp 2, tp 2:

        data and tp        (0 1) (2 3) (4 5) (6 7)    tp      (0 2 4 6) (1 3 5 7)    data, with cp as data
        context            (0 2) (1 3) (4 6) (5 7)    cp"""
    ranks = torch.arange(sizes.world_size).view([getattr(sizes, axis) for axis in sizes.axes])
    return ranks.permute([sizes.axes.index(axis) for axis in AXES])


def _permute_axes(grid: Tensor, *axes: str) -> Tensor:
    """Return the grid of ranks with its axes in another order."""
    return grid.permute([AXES.index(axis) for axis in axes])


def _build_expert_mesh(layout: Layout, sizes: ParallelDims, grid: Tensor, device_type: str) -> DeviceMesh:
    """Build the mesh of the ranks of a stage: expert parallelism inside, ranks with the same experts outside.

    For dp_shard 2, tp 2, ep 2, in one stage: ep (0 1) (2 3), ranks with the same experts (0 2) (1 3)."""
    by_stage = _permute_axes(grid, "pp", "dp_replicate", "dp_shard", "cp", "tp").flatten(1)
    num_same_experts = by_stage.shape[1] // sizes.ep
    replicate = {"ddp": num_same_experts, "hsdp": sizes.dp_replicate}.get(layout.data_parallel, 1)
    shape = {"stages": sizes.pp, "dp_replicate": replicate, "dp_shard": num_same_experts // replicate, "ep": sizes.ep}
    # Axes of sharded state stay even if their size is one: parameters of one kind are stepped together.
    needed = ("stages", "ep", "dp_shard") if layout.data_parallel in SHARDED_STRATEGIES else ("stages", "ep")
    expert_sizes = {axis: size for axis, size in shape.items() if size > 1 or axis in needed}
    expert_mesh = make_device_mesh(device_type, by_stage.reshape(list(expert_sizes.values())), tuple(expert_sizes))
    return expert_mesh[tuple(axis for axis in expert_sizes if axis != "stages")]


def make_device_mesh(device_type: str, rank_grid: Tensor, axes: tuple[str, ...]) -> DeviceMesh:
    """Make a mesh of named axes over a grid of global ranks.

    On GPUs its groups use NCCL alone, unless they span the whole world: gloo would connect all pairs of ranks of each
    group."""
    if not _needs_gpu_groups(device_type):
        return DeviceMesh(device_type, rank_grid, mesh_dim_names=axes)
    backends: list[tuple[str | None, Any]] = []
    for axis, size in zip(axes, rank_grid.shape, strict=True):
        if axis == "pp":
            backends.append(("nccl", _build_pipeline_options()))
        else:
            backends.append((None if size == dist.get_world_size() else "nccl", None))
    return DeviceMesh(device_type, rank_grid, mesh_dim_names=axes, backend_override=tuple(backends))


def _flatten_to_group(mesh: DeviceMesh | None, name: str) -> dist.ProcessGroup | None:
    """Return one group over all axes of a mesh. A mesh of a single axis already has this group."""
    if mesh is None:
        return None
    if mesh.ndim == 1:
        return mesh.get_group()
    has_own_group = _needs_gpu_groups(mesh.device_type) and mesh.size() < dist.get_world_size()
    return mesh._flatten(name, backend_override="nccl" if has_own_group else None).get_group()


def _needs_gpu_groups(device_type: str) -> bool:
    return device_type == "cuda" and sends_gpu_tensors(None)


def new_pipeline_group(pipelines: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """Create an NCCL group for each pipeline, and return the group of this rank (a collective)."""
    own_group = None
    for pipeline in pipelines:
        group = dist.new_group(list(pipeline), backend="nccl", pg_options=_build_pipeline_options())
        own_group = group if dist.get_rank() in pipeline else own_group
    return own_group


def _build_pipeline_options() -> Any:
    """Return the NCCL options for one pipeline's group; each group needs its own object."""
    c10d: Any = dist.distributed_c10d
    options: Any = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = MAX_PIPELINE_CHANNELS
    options._timeout = c10d.default_pg_nccl_timeout
    return options
