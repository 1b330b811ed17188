"""Traffic of parameter servers and their workers in a step, by operation and group."""

from __future__ import annotations

from collections import defaultdict

from phalanx.cost.exact.scalar_reductions import REDUCTION_PURPOSE, num_expert_loads, num_reduced_scalars
from phalanx.cost.exact.traffic import server_loads
from phalanx.cost.formulas.collectives import Operation, Traffic
from phalanx.cost.precision import STATE_BYTES
from phalanx.spec.parameter_shapes import trained_shapes
from phalanx.spec.resolved_run import ResolvedRun

Group = tuple[int, ...]


def parameter_server_collectives(resolved: ResolvedRun, rank: int) -> dict[tuple[str, Group], list[Traffic]]:
    """Return the planned traffic of a rank by operation and ranks of the group.

    Workers send each server the gradients of its parameters, and the scalar sums of the step. The server broadcasts its
    weights to the workers. The first server also broadcasts the result of the step. Servers all-reduce the norm of the
    gradient among themselves.
    """
    run = resolved.run
    servers = resolved.dims.servers
    element_bytes = STATE_BYTES[run.training.precision]
    workers = tuple(range(servers, resolved.world_size))
    owned_bytes = [element_bytes * load for load in server_loads(trained_shapes(run.model), servers)]
    num_scalars = num_reduced_scalars(run)
    updates_biases = run.model.moe is not None and run.model.moe.bias_update_rate
    num_biases = num_expert_loads(run) if updates_biases else 0
    traffic = defaultdict[tuple[str, Group], list[Traffic]](list)

    def add(operation: Operation, group: Group, size_bytes: float, purpose: str, calls: int = 1) -> None:
        traffic[operation, group].append(Traffic(operation, size_bytes, purpose, "servers", calls))

    for server in range(servers) if rank in workers else (rank,):
        add("broadcast", (server, *workers), owned_bytes[server], "weights")
        if server == 0:
            add("broadcast", (server, *workers), 8 * (2 + num_scalars + num_biases), REDUCTION_PURPOSE)
    if rank in workers:
        all_ranks = tuple(range(resolved.world_size))
        add("send", all_ranks, sum(owned_bytes), "gradients", servers)
        add("send", all_ranks, 8 * (num_scalars + 1) * servers, REDUCTION_PURPOSE, servers)
    elif servers > 1:
        add("all_reduce", tuple(range(servers)), 2 * (servers - 1) / servers * 8, REDUCTION_PURPOSE)
    return dict(traffic)
