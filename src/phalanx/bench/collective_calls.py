"""Collective calls as in training: the process groups of a run's mesh, and the functions."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from phalanx.bench.collectives import Call, CollectiveKind
from phalanx.cost.formulas.collectives import Operation
from phalanx.parallel.comm.collectives import ReduceScatter, all_gather
from phalanx.parallel.comm.wait_timer import WaitTimer
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.tensor.parameter_sharding import ModelSharding
from phalanx.spec.layout import SHARDED_STRATEGIES
from phalanx.spec.run import RunSpec
from phalanx.spec.tensor_sharding import head_replications, parameter_shardings


def process_group_for(run: RunSpec, mesh: Mesh, kind: CollectiveKind) -> dist.ProcessGroup | object:
    """Return this rank's process group for a kind of collective, or torch's marker of a non-member.

    All ranks must call this for the same kinds in the same order, because some groups are created by the call: a
    broadcast among servers creates the group of the first server and its workers. `mesh` is that of the run's
    layout on all ranks.
    """
    hybrid = run.layout.data_parallel == "hsdp"
    match kind.group_kind:
        case "data":
            shards = mesh.submesh("dp_shard") if run.layout.data_parallel in SHARDED_STRATEGIES else None
            group = mesh.dp_group if shards is None else shards.get_group()
        case "replicas":
            assert mesh.device_mesh is not None
            group = mesh.device_mesh["dp_replicate"].get_group()
        case "same_experts" if not hybrid:
            group = mesh.expert_dp_group
        case "same_experts" | "expert_replicas":
            assert mesh.ep_mesh is not None
            group = mesh.ep_mesh["dp_shard" if kind.group_kind == "same_experts" else "dp_replicate"].get_group()
        case "tp":
            group = mesh.tp_group
        case "copies":
            copies = max(count for count in head_replications(run.model, run.layout.tp) if count < run.layout.tp)
            shardings = parameter_shardings(run.model, run.layout)
            name = next(
                name for name, sharding in shardings.items() if sharding.dim == 0 and sharding.replication == copies
            )
            group = ModelSharding(run.model, run.layout, mesh).gradient_reduce_group(name)
        case "cp":
            group = None if mesh.cp_mesh is None else mesh.cp_mesh.get_group()
        case "ep":
            group = None if mesh.ep_mesh is None else mesh.ep_mesh["ep"].get_group()
        case "servers" if kind.operation == "broadcast":
            # The group of the first server; others do the same at other times.
            return dist.new_group([0, *range(mesh.dims.servers, mesh.dims.world_size)])
        case "servers":
            group = dist.group.WORLD
        case _:
            group = mesh.pipeline_groups[0]
    assert group is not None, f"nobody sends {kind.name}"
    return group


def _all_reduce(out: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
    if out is not sent:  # PyTorch's broadcast is in place
        out.copy_(sent)
    dist.all_reduce(out, group=group)


def _broadcast(out: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
    if out is not sent and group.rank() == 0:
        out.copy_(sent)
    dist.broadcast(out, group=group, group_src=0)


def _ring_send(out: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
    rank = group.rank()
    size = group.size()
    send_op = dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % size)
    recv_op = dist.P2POp(dist.irecv, out, group=group, group_peer=(rank - 1) % size)
    for work in dist.batch_isend_irecv([send_op, recv_op]):
        work.wait()


COLLECTIVE_CALLS: dict[Operation, Call] = {
    "all_reduce": _all_reduce,
    "all_gather": lambda out, sent, group: all_gather(out, sent, group=group),
    "reduce_scatter": lambda out, sent, group: ReduceScatter(sent, out, group, comm_wait=WaitTimer()).wait(),
    "all_to_all": lambda out, sent, group: dist.all_to_all_single(out, sent, group=group),
    "broadcast": _broadcast,
    "send": _ring_send,
}
"""Functions per operation, as in training. On a CPU a reduce-scatter is an all-to-all and a sum."""
