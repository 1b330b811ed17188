"""What each rank of a run sends in one optimizer update: the formulas of `network.py` for its model and layout."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from phalanx.cost.exact.activation_memory import StageBlocks, pipeline_stages
from phalanx.cost.exact.activation_traffic import stage_activation_traffic
from phalanx.cost.exact.collective_counts import CollectiveCounts, count_collectives
from phalanx.cost.exact.layout_checks import check_layout
from phalanx.cost.exact.parameter_shapes import (
    Shapes,
    is_muon_parameter,
    max_shard_elements,
    num_elements,
    parameter_shapes,
)
from phalanx.cost.exact.pipeline_split import layers_per_stage
from phalanx.cost.exact.rank_memory import effective_strategy
from phalanx.cost.exact.rank_tensors import RankTensors, rank_tensors
from phalanx.cost.exact.saved_tensors import ForwardShape
from phalanx.cost.formulas.collectives import Traffic, sent_bytes, step_traffic
from phalanx.cost.precision import COMPUTE_BYTES, STATE_BYTES
from phalanx.schedule.registry import layout_schedule
from phalanx.spec.batch import plan_batch
from phalanx.spec.communication_groups import GroupKind
from phalanx.spec.degrees import parallel_dims, uses_model_parallelism
from phalanx.spec.layout import SHARDED_STRATEGIES, Layout, assign_parameters_to_servers
from phalanx.spec.run import RunSpec
from phalanx.spec.tensor_sharding import rows_on_rank, tensor_sharding


def traffic_by_role(run: RunSpec, world_size: int) -> dict[str, list[Traffic]]:
    """Traffic by role, as in `memory.rank_memory`: of the fullest "rank"; with a parameter server of "server" and
    "worker"; of every place of a pipeline, "pp0", "pp1", ...

    Exact but for what is smaller than a kilobyte (sums of losses and norms); of PowerSGD what steps send once it
    compresses, and of experts what balanced ones would; not what Muon sends to ranks that share a matrix. Rows that
    ranks share unevenly are sent with padding, and counted so. Raises UserError if the layout cannot run on so many
    ranks.
    """
    return {role: _merge_rows(rows) for role, rows in traffic_by_group(run, world_size).items()}


def traffic_by_group(run: RunSpec, world_size: int, rank: int = 0) -> dict[str, list[Traffic]]:
    """The same, with what goes among different ranks in different rows; by default of the first rank of each role, the
    fullest, or of ranks that share tensors as `rank` does."""
    check_layout(run, world_size)
    layout, sizes, shapes = run.layout, parallel_dims(run.layout, world_size), parameter_shapes(run.model)
    if layout.data_parallel == "parameter_server":
        return _parameter_server_traffic(shapes, layout, STATE_BYTES[run.training.precision], sizes.dp_size)
    at = sizes.coordinates(rank)
    of_places, shard = rank_tensors(run, world_size, at["tp"]), at["dp_shard"] * sizes.cp + at["cp"]
    sent = [
        [row for row in [*_data_parallel_traffic(run, world_size, held, shard), *between] if row.bytes]
        for held, between in zip(of_places, _model_parallel_traffic(run, world_size, of_places), strict=True)
    ]
    return {"rank": sent[0]} if layout.pp == 1 else {f"pp{place}": rows for place, rows in enumerate(sent)}


def _data_parallel_traffic(run: RunSpec, world_size: int, rank: RankTensors, shard: int) -> list[Traffic]:
    """What ranks with the same part of a model and other data send, of parameters and gradients; of those that share
    rows, the one with this number."""
    layout, sizes = run.layout, parallel_dims(run.layout, world_size)
    data, cut = (
        sizes.with_cp_as_data_parallel(sharded=layout.data_parallel in SHARDED_STRATEGIES),
        plan_batch(run, world_size),
    )
    # In a pipeline gradients are summed once a step.
    times = cut.gradient_accumulation_steps if layout.pp == 1 else 1
    apart = (
        rank.expert_shards
        if layout.data_parallel in SHARDED_STRATEGIES
        else sizes.dp_size * sizes.cp * sizes.tp // sizes.ep
    )
    ranks = data.dp_shard if layout.data_parallel in SHARDED_STRATEGIES else data.dp_size
    dense = _sharded_traffic(
        rank.dense, run, ranks, data.dp_replicate, times, count_collectives(run, rank, data.dp_shard)
    )
    of_experts = count_collectives(run, rank, data.dp_shard, for_experts=True)
    experts = [
        replace(row, group_kind="same_experts" if row.group_kind == "data" else "expert_replicas")
        for row in _sharded_traffic(rank.expert, run, apart, data.dp_replicate, times, of_experts)
    ]
    return [*dense, *experts, *_partial_gradient_traffic(rank, run, shard)]


def _sharded_traffic(
    shapes: Shapes, run: RunSpec, ranks: int, replicas: int, times: int, calls: CollectiveCounts
) -> list[Traffic]:
    """Among `ranks` that share a copy of these tensors (ddp: each have one), of which there are so many replicas."""
    layout, precision = run.layout, run.training.precision
    computed, kept = COMPUTE_BYTES[precision], STATE_BYTES[precision]
    whole = _padded(shapes, ranks if layout.data_parallel in SHARDED_STRATEGIES else 1)
    if layout.data_parallel == "ddp":
        sent = {"none": kept * whole, "bf16": 2 * whole, "powersgd": kept * _powersgd(shapes, layout.powersgd_rank)}
        return _with_calls(calls.blocks, step_traffic("ddp", kept * whole, sent[layout.gradient_compression], ranks))
    muon = [] if uses_model_parallelism(layout) else _muon_traffic(shapes, run, ranks)
    if layout.data_parallel in ("zero1", "zero2"):
        traffic = step_traffic(layout.data_parallel, computed * whole, computed * whole, ranks, times)
        return [*_with_calls(calls.blocks, traffic), *muon]
    blocks = {name: shape for name, shape in shapes.items() if name.startswith("blocks.") and calls.blocks}
    in_blocks = _padded(blocks, ranks)
    # The root's parameters (embedding, last norm, head) stay gathered between the two passes.
    reshard = layout.reshard_after_forward and layout.pp == 1
    traffic = [
        row
        for count, reshards, of in ((in_blocks, reshard, calls.blocks), (whole - in_blocks, False, calls.root))
        for row in _with_calls(
            of,
            step_traffic(
                layout.data_parallel,
                computed * count,
                kept * count,
                ranks,
                times,
                replicas=replicas,
                reshard_after_forward=reshards,
            ),
        )
    ]
    return [*traffic, *muon]


def _with_calls(count: int, traffic: list[Traffic]) -> list[Traffic]:
    return [replace(row, calls=count * row.calls) for row in traffic]


def _partial_gradient_traffic(rank: RankTensors, run: RunSpec, shard: int) -> list[Traffic]:
    """Gradients of which each of the ranks that share products has a term: of one group of ranks at once."""
    layout, precision, sizes = run.layout, run.training.precision, dict[tuple[int, GroupKind], int]()
    number = COMPUTE_BYTES[precision] if layout.data_parallel in ("zero1", "zero2") else STATE_BYTES[precision]
    for name, shape in rank.dense.items():
        share = tensor_sharding(run.model, layout, name)
        if share.is_partial_sum:
            ranks: tuple[int, GroupKind] = share.replication, "tp" if share.replication == layout.tp else "copies"
            rows = rows_on_rank(shard, shape[0], rank.shards) if rank.shards > 1 else shape[0]
            sizes[ranks] = sizes.get(ranks, 0) + number * num_elements((rows, *shape[1:]))
    why = "gradients of which ranks that share products have terms"
    return [Traffic("all_reduce", sent_bytes("all_reduce", size, n), why, among) for (n, among), size in sizes.items()]


def _model_parallel_traffic(run: RunSpec, world_size: int, of_places: list[RankTensors]) -> list[list[Traffic]]:
    """What ranks that share a model send at each place of the pipeline, of activations and their gradients."""
    layout, spec, cut = run.layout, run.model, plan_batch(run, world_size)
    data = parallel_dims(layout, world_size).with_cp_as_data_parallel(
        sharded=layout.data_parallel in SHARDED_STRATEGIES
    )
    of = ForwardShape(
        cut.micro_batch_size,
        run.training.seq_len,
        run.training.precision,
        layout,
        effective_strategy(layout, data.dp_shard) == "ddp",
        run.data.mask_documents,
    )
    if layout.pp == 1:
        return [
            _scaled(
                cut.gradient_accumulation_steps,
                stage_activation_traffic(spec, of, StageBlocks(range(spec.num_layers), True, True)),
            )
        ]
    schedule = layout_schedule(layout, cut.gradient_accumulation_steps)
    stages, message = (
        pipeline_stages(layers_per_stage(run), schedule),
        of.residual_tokens * spec.hidden_size * of.residual_bytes,
    )
    first, last = schedule.end_ranks
    tied = spec.tie_embeddings and first != last
    found = []
    for place in range(layout.pp):
        mine = schedule.stages_of(place)
        rows = [row for stage in mine for row in stage_activation_traffic(spec, of, stages[stage])]
        sends = sum(to != place for _, to in schedule.messages(place))
        rows = [
            *_scaled(cut.gradient_accumulation_steps, rows),
            Traffic("send", sends * message, "activations and their gradients, from stage to stage", "pp", sends),
        ]
        if tied and (0 in mine or schedule.stages - 1 in mine):
            size = num_elements(of_places[first].dense["embedding.weight"]) * of.residual_bytes
            rows.append(Traffic("send", size, "the tied embedding's weights, or their gradients", "ends"))
        found.append(rows)
    return found


def _scaled(count: int, traffic: list[Traffic]) -> list[Traffic]:
    return [replace(row, bytes=count * row.bytes, calls=count * row.calls) for row in traffic]


def _powersgd(shapes: Shapes, rank: int) -> int:
    """Numbers that PowerSGD sends: of a tensor as a matrix [n, m] two thin ones of n x rank and rank x m, where they
    have less than half of its numbers; of others all (arXiv 1905.13727, algorithm 1; PyTorch's powerSGD_hook)."""
    total = 0
    for shape in shapes.values():
        n, m = shape[0], num_elements(shape) // shape[0]
        thin = (n + m) * min(n, m, rank)
        total += thin if len(shape) > 1 and 2 * (n + m) * rank < n * m else n * m
    return total


def _muon_traffic(shapes: Shapes, run: RunSpec, ranks: int) -> list[Traffic]:
    """What Muon sends where ranks have rows of its matrices: its momenta, so that each matrix is whole on one rank, and
    the rows of what comes of it back (`train.muon`). Experts are whole matrices already."""
    if run.optimizer.name != "muon" or ranks == 1:
        return []
    alike = Counter(shape for name, shape in shapes.items() if len(shape) == 2 and is_muon_parameter(name, shape))
    gathered = sum(count * max_shard_elements(shape, ranks) for shape, count in alike.items())
    returned = sum(-(-count // ranks) * num_elements(shape) for shape, count in alike.items())
    size = COMPUTE_BYTES["fp64" if run.training.precision == "fp64" else "bf16"] * (gathered + returned)
    why = "Muon's momenta, to whole matrices and back"
    return [Traffic("all_to_all", sent_bytes("all_to_all", size, ranks), why, calls=2 * len(alike))]


def _parameter_server_traffic(shapes: Shapes, layout: Layout, kept: int, workers: int) -> dict[str, list[Traffic]]:
    """Servers broadcast what they own (asynchronously they send it to each worker), workers send gradients back."""
    servers, whole = layout.num_servers, kept * sum(map(num_elements, shapes.values()))
    owned = kept * max(server_loads(shapes, servers))
    down = Traffic("broadcast", owned, "weights", "servers")
    up = Traffic("broadcast", whole, "weights", "servers", servers)
    if layout.max_staleness is not None:
        down = Traffic("send", workers * owned, "weights", "servers", workers)
        up = Traffic("recv", whole, "weights", "servers", servers)
    return {
        "server": [down, Traffic("recv", workers * owned, "gradients", "servers", workers)],
        "worker": [up, Traffic("send", whole, "gradients", "servers", servers)],
    }


def server_loads(shapes: Shapes, servers: int) -> list[int]:
    """Numbers that each server owns."""
    sizes, loads = {name: num_elements(shape) for name, shape in shapes.items()}, [0] * servers
    for name, server in assign_parameters_to_servers(sizes, servers).items():
        loads[server] += sizes[name]
    return loads


def _padded(shapes: Shapes, ranks: int) -> int:
    return sum(ranks * max_shard_elements(shape, ranks) for shape in shapes.values())


def _merge_rows(traffic: list[Traffic]) -> list[Traffic]:
    """Rows of the same operation and purpose added up."""
    total: dict[tuple[str, str], Traffic] = {}
    for row in traffic:
        more = total.get((row.operation, row.purpose), Traffic(row.operation, 0, row.purpose, calls=0))
        total[row.operation, row.purpose] = replace(more, bytes=more.bytes + row.bytes, calls=more.calls + row.calls)
    return list(total.values())
