"""Traffic of parameter servers and their workers in a step, by operation and group."""

from __future__ import annotations

from phalanx.cost.exact.parameter_shapes import parameter_shapes
from phalanx.cost.exact.scalar_reductions import NUM_SCALARS, REDUCTION_PURPOSE, num_reduced_scalars
from phalanx.cost.exact.traffic import server_loads
from phalanx.cost.formulas.collectives import Traffic
from phalanx.cost.precision import STATE_BYTES
from phalanx.spec.parallel_dims import parallel_dims
from phalanx.spec.run import RunSpec

Group = tuple[int, ...]


def parameter_server_collectives(run: RunSpec, world_size: int, rank: int) -> dict[tuple[str, Group], list[Traffic]]:
    """Return the planned traffic of a rank by operation and ranks of the group.

    Workers send each server its gradients, and all sums; the server broadcasts its weights to them. The first server
    also broadcasts the result of the step. Servers sum the gradient's norm among themselves.
    """
    servers = parallel_dims(run.layout, world_size).servers
    element_bytes = STATE_BYTES[run.training.precision]
    workers = tuple(range(servers, world_size))
    owned_bytes = [element_bytes * load for load in server_loads(parameter_shapes(run.model), servers)]
    biases = (
        num_reduced_scalars(run) - NUM_SCALARS if run.model.moe is not None and run.model.moe.bias_update_rate else 0
    )
    scalar_bytes = 8 * (2 + num_reduced_scalars(run) + biases)
    traffic: dict[tuple[str, Group], list[Traffic]] = {}
    for server in range(servers) if rank in workers else (rank,):
        rows = [Traffic(operation="broadcast", bytes=owned_bytes[server], purpose="weights", group_kind="servers")]
        rows += (
            [Traffic(operation="broadcast", bytes=scalar_bytes, purpose=REDUCTION_PURPOSE, group_kind="servers")]
            if server == 0
            else []
        )
        traffic["broadcast", (server, *workers)] = rows
    if rank in workers:
        messages = Traffic(
            operation="send",
            bytes=8 * (num_reduced_scalars(run) + 1) * servers,
            purpose=REDUCTION_PURPOSE,
            group_kind="servers",
            calls=servers,
        )
        all_ranks = tuple(range(world_size))
        traffic["send", all_ranks] = [
            Traffic(operation="send", bytes=sum(owned_bytes), purpose="gradients", group_kind="servers", calls=servers),
            messages,
        ]
    elif servers > 1:
        squared_norm = Traffic(
            operation="all_reduce",
            bytes=2 * (servers - 1) / servers * 8,
            purpose=REDUCTION_PURPOSE,
            group_kind="servers",
        )
        traffic["all_reduce", tuple(range(servers))] = [squared_norm]
    return traffic
