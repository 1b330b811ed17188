"""Bytes that each rank of a run sends in one optimizer update.

`cost.formulas.collectives` has the formulas, which this module applies to the run's model and layout.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod

from phalanx.cost.exact.collective_counts import CollectiveCounts, count_collectives
from phalanx.cost.exact.layout_checks import check_layout
from phalanx.cost.exact.model_parallel_traffic import model_parallel_traffic
from phalanx.cost.exact.model_state import zero_gradient_bytes
from phalanx.cost.exact.teacher_traffic import teacher_traffic
from phalanx.cost.formulas.collectives import Traffic, sent_bytes, step_traffic
from phalanx.cost.precision import COMPUTE_BYTES, STATE_BYTES
from phalanx.program.rank_tensors import RankTensors, rank_tensors
from phalanx.spec.communication_groups import GroupKind
from phalanx.spec.layout import SHARDED_STRATEGIES, ZERO_STRATEGIES, Layout, assign_parameters_to_servers
from phalanx.spec.parallel_dims import uses_model_parallelism
from phalanx.spec.parameter_shapes import Shapes, is_muon_parameter, num_elements, trained_shapes
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.spec.tensor_sharding import data_parallel_axis, max_shard_elements, parameter_shardings, rows_on_rank


def traffic_by_role(resolved: ResolvedRun) -> dict[str, list[Traffic]]:
    """Return traffic by role, as in `rank_memory`: of the fullest rank of each role.

    The role is "rank"; with a parameter server "server" and "worker"; in a pipeline "pp0", "pp1", ... by pipeline rank.

    Exact except for rows below a kilobyte, which are sums of losses and norms. PowerSGD counts steps after compression
    has started, and experts are balanced. Muon's traffic between ranks that share a matrix is not counted. Uneven
    shards are sent with padding, and counted with padding. Raises UserError if the ranks cannot run the layout.
    """
    return {role: _merge_rows(rows) for role, rows in traffic_by_group(resolved).items()}


def traffic_by_group(resolved: ResolvedRun, rank: int = 0) -> dict[str, list[Traffic]]:
    """Return traffic by role as in `traffic_by_role`, with one row per process group.

    The shards of tensors are those of `rank`: by default the first and fullest rank of each role.
    """
    run = resolved.run
    check_layout(resolved)
    layout = run.layout
    dims = resolved.dims
    if layout.data_parallel == "parameter_server":
        shapes = trained_shapes(run.model)
        return _parameter_server_traffic(shapes, layout, STATE_BYTES[run.training.precision], workers=dims.dp_size)
    coordinates = dims.coordinates(rank)
    stage_tensors = rank_tensors(resolved, coordinates["tp"])
    shard_index = coordinates["dp_shard"] * dims.cp + coordinates["cp"]
    rows_by_stage = (
        [*_data_parallel_traffic(resolved, tensors, shard_index), *model_parallel]
        for tensors, model_parallel in zip(stage_tensors, model_parallel_traffic(resolved, stage_tensors), strict=True)
    )
    traffic = [[row for row in rows if row.bytes] for rows in rows_by_stage]
    if teachers := teacher_traffic(resolved, coordinates["tp"]):
        traffic = [[*rows, *of_teacher] for rows, of_teacher in zip(traffic, teachers, strict=True)]
    return {"rank": traffic[0]} if layout.pp == 1 else {f"pp{pp_rank}": rows for pp_rank, rows in enumerate(traffic)}


def _data_parallel_traffic(resolved: ResolvedRun, rank: RankTensors, shard_index: int) -> list[Traffic]:
    """Return a rank's data-parallel traffic of parameters and gradients.

    `shard_index` is the index of the rank among the ranks that shard the same parameters.
    """
    data_dims = resolved.data_dims
    is_sharded = resolved.layout.data_parallel in SHARDED_STRATEGIES
    ranks = data_dims.dp_shard if is_sharded else data_dims.dp_size
    expert_ranks = rank.expert_shards if is_sharded else resolved.dims.expert_dp_size
    dense = _sharded_traffic(resolved, rank, rank.dense, ranks, count_collectives(resolved, rank))
    experts = [
        replace(row, group_kind="same_experts" if row.group_kind == "data" else "expert_replicas")
        for row in _sharded_traffic(
            resolved, rank, rank.expert, expert_ranks, count_collectives(resolved, rank, for_experts=True)
        )
    ]
    return [*dense, *experts, *_partial_gradient_traffic(resolved, rank, shard_index)]


def _sharded_traffic(
    resolved: ResolvedRun, rank: RankTensors, shapes: Shapes, ranks: int, calls: CollectiveCounts
) -> list[Traffic]:
    """Return the traffic among `ranks` that share a copy of these tensors (with ddp, that each have one)."""
    trained = rank.without_frozen(shapes)
    run = resolved.run
    layout = run.layout
    # In a pipeline, gradients are reduced once per step.
    num_reductions = resolved.micro_batches if layout.pp == 1 else 1
    precision = run.training.precision
    compute_bytes = COMPUTE_BYTES[precision]
    state_bytes = STATE_BYTES[precision]
    total = _padded_elements(trained, ranks if layout.data_parallel in SHARDED_STRATEGIES else 1)

    def times_calls(count: int, parameter_bytes: float, gradient_bytes: float, reshard: bool = False) -> list[Traffic]:
        rows = step_traffic(
            layout.data_parallel,
            parameter_bytes,
            gradient_bytes,
            ranks,
            num_reductions,
            replicas=resolved.data_dims.dp_replicate,
            reshard_after_forward=reshard,
        )
        return [replace(row, calls=count * row.calls) for row in rows]

    if layout.data_parallel == "ddp":
        sent_by_compression = {
            "none": state_bytes * total,
            "bf16": 2 * total,
            "powersgd": state_bytes * _powersgd_elements(trained, layout.powersgd_rank),
        }
        return times_calls(calls.blocks, state_bytes * total, sent_by_compression[layout.gradient_compression])
    muon = [] if uses_model_parallelism(layout) else _muon_traffic(trained, run, ranks)
    if layout.data_parallel in ZERO_STRATEGIES:
        return [*times_calls(calls.blocks, compute_bytes * total, compute_bytes * total), *muon]
    blocks = {name: shape for name, shape in shapes.items() if name.startswith("blocks.") and calls.blocks}

    def gathered_bytes(shapes: Shapes) -> int:
        return sum(
            rank.itemsize(name, compute_bytes) * ranks * max_shard_elements(shape, ranks)
            for name, shape in shapes.items()
        )

    in_blocks = gathered_bytes(blocks)
    # Parameters outside blocks are gathered once: the embedding's backward pass does not need them, and the head's
    # follows its forward pass.
    outside = gathered_bytes(shapes) - in_blocks
    reshard = layout.reshard_after_forward and layout.pp == 1
    # Blocks without a backward pass are not gathered for one.
    forward_only = gathered_bytes(
        {name: shape for name, shape in blocks.items() if int(name.split(".")[1]) < rank.num_forward_only_blocks}
    )
    trained_in_blocks = _padded_elements(rank.without_frozen(blocks), ranks)
    return [
        *times_calls(calls.blocks, in_blocks - forward_only, 0, reshard),
        *times_calls(calls.forward_only, forward_only, 0),
        *times_calls(calls.reductions, 0, state_bytes * trained_in_blocks),
        *times_calls(calls.outside_blocks, outside, 0),
        *times_calls(calls.outside_reductions, 0, state_bytes * (total - trained_in_blocks)),
        *muon,
    ]


def _partial_gradient_traffic(resolved: ResolvedRun, rank: RankTensors, shard_index: int) -> list[Traffic]:
    """Return the traffic of gradients that tensor-parallel ranks hold as partial sums, by group."""
    run = resolved.run
    layout = run.layout
    precision = run.training.precision
    bytes_by_group = dict[tuple[int, GroupKind], int]()
    bytes_per_element = STATE_BYTES[precision]
    if resolved.strategy in ZERO_STRATEGIES:
        bytes_per_element = zero_gradient_bytes(precision, resolved.micro_batches)
    shardings = parameter_shardings(run.model, layout)
    for name, shape in rank.without_frozen(rank.dense).items():
        sharding = shardings[name]
        if sharding.is_partial_sum:
            group: tuple[int, GroupKind] = sharding.replication, "tp" if sharding.replication == layout.tp else "copies"
            rows = rows_on_rank(shard_index, shape[0], rank.shards) if rank.shards > 1 else shape[0]
            bytes_by_group[group] = bytes_by_group.get(group, 0) + bytes_per_element * num_elements((rows, *shape[1:]))
    purpose = "partial gradients of parameters that several ranks use"
    return [
        Traffic("all_reduce", sent_bytes("all_reduce", size, n), purpose, group_kind)
        for (n, group_kind), size in bytes_by_group.items()
    ]


def _powersgd_elements(shapes: Shapes, rank: int) -> int:
    """Return the number of elements that PowerSGD sends.

    A tensor as a matrix [n, m] becomes two thin matrices, n x rank and rank x m, if these have less than half of its
    elements. Other tensors are sent in full (arXiv 1905.13727, algorithm 1; PyTorch's powerSGD_hook).
    """
    total = 0
    for shape in shapes.values():
        n = shape[0]
        m = num_elements(shape) // shape[0]
        thin_elements = (n + m) * min(n, m, rank)
        total += thin_elements if len(shape) > 1 and 2 * (n + m) * rank < n * m else n * m
    return total


def _muon_traffic(shapes: Shapes, run: RunSpec, ranks: int) -> list[Traffic]:
    """Return the traffic of Muon if ranks have rows of its matrices.

    Ranks send momenta, so that each matrix is complete on one rank, and receive the rows of its result
    (`train.optim.muon`). Experts are complete matrices already, if there are not fewer than ranks.
    """
    if run.optimizer.name != "muon" or ranks == 1:
        return []
    shape_counts = Counter(
        shape
        for name, shape in shapes.items()
        if is_muon_parameter(name, shape) and (len(shape) == 2 or data_parallel_axis(shape, ranks))
    )
    gathered = sum(count * max_shard_elements(shape, ranks) for shape, count in shape_counts.items())
    returned = sum(-(-count * prod(shape[:-2]) // ranks) * prod(shape[-2:]) for shape, count in shape_counts.items())
    size = COMPUTE_BYTES["fp64" if run.training.precision == "fp64" else "bf16"] * (gathered + returned)
    purpose = "Muon's momenta, to whole matrices and back"
    return [Traffic("all_to_all", sent_bytes("all_to_all", size, ranks), purpose, calls=2 * len(shape_counts))]


def _parameter_server_traffic(
    shapes: Shapes, layout: Layout, bytes_per_element: int, workers: int
) -> dict[str, list[Traffic]]:
    """Return the traffic of a server and of a worker.

    Servers broadcast their parameters, or asynchronously send them to each worker. Workers send gradients back.
    """
    servers = layout.num_servers
    total_bytes = bytes_per_element * sum(map(num_elements, shapes.values()))
    owned_bytes = bytes_per_element * max(server_loads(shapes, servers))
    down = Traffic("broadcast", owned_bytes, "weights", "servers")
    up = Traffic("broadcast", total_bytes, "weights", "servers", calls=servers)
    if layout.max_staleness is not None:
        down = Traffic("send", workers * owned_bytes, "weights", "servers", calls=workers)
        up = Traffic("recv", total_bytes, "weights", "servers", calls=servers)
    received = Traffic("recv", workers * owned_bytes, "gradients", "servers", calls=workers)
    sent = Traffic("send", total_bytes, "gradients", "servers", calls=servers)
    return {"server": [down, received], "worker": [up, sent]}


def server_loads(shapes: Shapes, num_servers: int) -> list[int]:
    """Return the number of elements that each server owns."""
    sizes = {name: num_elements(shape) for name, shape in shapes.items()}
    loads = [0] * num_servers
    for name, server in assign_parameters_to_servers(sizes, num_servers).items():
        loads[server] += sizes[name]
    return loads


def _padded_elements(shapes: Shapes, ranks: int) -> int:
    return sum(ranks * max_shard_elements(shape, ranks) for shape in shapes.values())


def _merge_rows(traffic: list[Traffic]) -> list[Traffic]:
    """Return the sums of rows with equal operation and purpose."""
    total: dict[tuple[str, str], Traffic] = {}
    for row in traffic:
        key = row.operation, row.purpose
        before = total.get(key, Traffic(row.operation, 0, row.purpose, calls=0))
        total[key] = replace(before, bytes=before.bytes + row.bytes, calls=before.calls + row.calls)
    return list(total.values())
