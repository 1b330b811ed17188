"""What each rank of a run sends in one optimizer update: the formulas of `network.py` for its model and layout."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from phalanx.cost.activations import Stage, stages_of
from phalanx.cost.calls import Calls, calls
from phalanx.cost.exchanges import stage_traffic
from phalanx.cost.kept import Pass
from phalanx.cost.memory import runs_as
from phalanx.cost.network import Among, Traffic, sent_bytes, update_traffic
from phalanx.cost.precision import COMPUTED, KEPT
from phalanx.cost.shapes import Shapes, elements, muon_trains, owned_elements, parameter_shapes
from phalanx.cost.shares import Held, rank_shapes
from phalanx.cost.stages import check_layout, stage_layers
from phalanx.schedule.named import schedule_of
from phalanx.spec.layout import SHARDED, Layout, degrees, is_shared, spread
from phalanx.spec.run import RunSpec, cut_batch
from phalanx.spec.share import rows_of, tensor_share


def run_traffic(run: RunSpec, world_size: int) -> dict[str, list[Traffic]]:
    """Traffic by role, as in `memory.rank_memory`: of the fullest "rank"; with a parameter server of "server" and
    "worker"; of every place of a pipeline, "pp0", "pp1", ...

    Exact but for what is smaller than a kilobyte (sums of losses and norms); of PowerSGD what steps send once it
    compresses, and of experts what balanced ones would; not what Muon sends to ranks that share a matrix. Rows that
    ranks share unevenly are sent with padding, and counted so. Raises UserError if the layout cannot run on so many
    ranks.
    """
    return {role: _merged(rows) for role, rows in grouped_traffic(run, world_size).items()}


def grouped_traffic(run: RunSpec, world_size: int, rank: int = 0) -> dict[str, list[Traffic]]:
    """The same, with what goes among different ranks in different rows; by default of the first rank of each role, the
    fullest, or of ranks that share tensors as `rank` does."""
    check_layout(run, world_size)
    layout, sizes, shapes = run.layout, degrees(run.layout, world_size), parameter_shapes(run.model)
    if layout.data == "parameter_server":
        return _served(shapes, layout, KEPT[run.training.precision], sizes.dp)
    at = sizes.place(rank)
    of_places, shard = rank_shapes(run, world_size, at["tp"]), at["dp_shard"] * sizes.cp + at["cp"]
    sent = [
        [row for row in [*_trained(run, world_size, held, shard), *between] if row.bytes]
        for held, between in zip(of_places, _shared(run, world_size, of_places), strict=True)
    ]
    return {"rank": sent[0]} if layout.pp == 1 else {f"pp{place}": rows for place, rows in enumerate(sent)}


def _trained(run: RunSpec, world_size: int, rank: Held, shard: int) -> list[Traffic]:
    """What ranks with the same part of a model and other data send, of parameters and gradients; of those that share
    rows, the one with this number."""
    layout, sizes = run.layout, degrees(run.layout, world_size)
    data, cut = sizes.as_data(sharded=layout.data in SHARDED), cut_batch(run, world_size)
    # In a pipeline gradients are summed once a step.
    times = cut.accumulation if layout.pp == 1 else 1
    apart = rank.apart_shards if layout.data in SHARDED else sizes.dp * sizes.cp * sizes.tp // sizes.ep
    ranks = data.dp_shard if layout.data in SHARDED else data.dp
    dense = _exchanged(rank.dense, run, ranks, data.dp_replicate, times, calls(run, rank, data.dp_shard))
    of_experts = calls(run, rank, data.dp_shard, apart=True)
    experts = [
        replace(row, among="same_experts" if row.among == "data" else "expert_replicas")
        for row in _exchanged(rank.apart, run, apart, data.dp_replicate, times, of_experts)
    ]
    return [*dense, *experts, *_summed(rank, run, shard)]


def _exchanged(shapes: Shapes, run: RunSpec, ranks: int, replicas: int, times: int, calls: Calls) -> list[Traffic]:
    """Among `ranks` that share a copy of these tensors (ddp: each have one), of which there are so many replicas."""
    layout, precision = run.layout, run.training.precision
    computed, kept = COMPUTED[precision], KEPT[precision]
    whole = _padded(shapes, ranks if layout.data in SHARDED else 1)
    if layout.data == "ddp":
        sent = {"none": kept * whole, "bf16": 2 * whole, "powersgd": kept * _powersgd(shapes, layout.compress_rank)}
        return _called(calls.blocks, update_traffic("ddp", kept * whole, sent[layout.compress], ranks))
    muon = [] if is_shared(layout) else _muons(shapes, run, ranks)
    if layout.data in ("zero1", "zero2"):
        traffic = update_traffic(layout.data, computed * whole, computed * whole, ranks, times)
        return [*_called(calls.blocks, traffic), *muon]
    blocks = {name: shape for name, shape in shapes.items() if name.startswith("blocks.") and calls.blocks}
    in_blocks = _padded(blocks, ranks)
    # The root's parameters (embedding, last norm, head) stay gathered between the two passes.
    reshard = layout.reshard and layout.pp == 1
    traffic = [
        row
        for count, reshards, of in ((in_blocks, reshard, calls.blocks), (whole - in_blocks, False, calls.root))
        for row in _called(
            of,
            update_traffic(
                layout.data, computed * count, kept * count, ranks, times, replicas=replicas,
                reshard_after_forward=reshards,
            ),
        )
    ]  # fmt: skip
    return [*traffic, *muon]


def _called(count: int, traffic: list[Traffic]) -> list[Traffic]:
    return [replace(row, calls=count * row.calls) for row in traffic]


def _summed(rank: Held, run: RunSpec, shard: int) -> list[Traffic]:
    """Gradients of which each of the ranks that share products has a term: of one group of ranks at once."""
    layout, precision, sizes = run.layout, run.training.precision, dict[tuple[int, Among], int]()
    number = COMPUTED[precision] if layout.data in ("zero1", "zero2") else KEPT[precision]
    for name, shape in rank.dense.items():
        share = tensor_share(run.model, layout, name)
        if share.partial:
            ranks: tuple[int, Among] = share.copies, "tp" if share.copies == layout.tp else "copies"
            rows = rows_of(shard, shape[0], rank.shards) if rank.shards > 1 else shape[0]
            sizes[ranks] = sizes.get(ranks, 0) + number * elements((rows, *shape[1:]))
    why = "gradients of which ranks that share products have terms"
    return [Traffic("all_reduce", sent_bytes("all_reduce", size, n), why, among) for (n, among), size in sizes.items()]


def _shared(run: RunSpec, world_size: int, of_places: list[Held]) -> list[list[Traffic]]:
    """What ranks that share a model send at each place of the pipeline, of activations and their gradients."""
    layout, spec, cut = run.layout, run.model, cut_batch(run, world_size)
    data = degrees(layout, world_size).as_data(sharded=layout.data in SHARDED)
    of = Pass(
        cut.micro_batch, run.training.sequence, run.training.precision, layout,
        runs_as(layout, data.dp_shard) == "ddp", run.data.mask_documents,
    )  # fmt: skip
    if layout.pp == 1:
        return [_times(cut.accumulation, stage_traffic(spec, of, Stage(range(spec.layers), True, True)))]
    schedule = schedule_of(layout, cut.accumulation)
    stages, message = stages_of(stage_layers(run), schedule), of.here * spec.width * of.stream
    first, last = schedule.ends
    tied = spec.tied and first != last
    found = []
    for place in range(layout.pp):
        mine = schedule.stages_of(place)
        rows = [row for stage in mine for row in stage_traffic(spec, of, stages[stage])]
        sends = sum(to != place for _, to in schedule.messages(place))
        rows = [
            *_times(cut.accumulation, rows),
            Traffic("send", sends * message, "activations and their gradients, from stage to stage", "pp", sends),
        ]
        if tied and (0 in mine or schedule.stages - 1 in mine):
            size = elements(of_places[first].dense["embedding.weight"]) * of.stream
            rows.append(Traffic("send", size, "the tied embedding's weights, or their gradients", "ends"))
        found.append(rows)
    return found


def _times(count: int, traffic: list[Traffic]) -> list[Traffic]:
    return [replace(row, bytes=count * row.bytes, calls=count * row.calls) for row in traffic]


def _powersgd(shapes: Shapes, rank: int) -> int:
    """Numbers that PowerSGD sends: of a tensor as a matrix [n, m] two thin ones of n x rank and rank x m, where they
    have less than half of its numbers; of others all (arXiv 1905.13727, algorithm 1; PyTorch's powerSGD_hook)."""
    total = 0
    for shape in shapes.values():
        n, m = shape[0], elements(shape) // shape[0]
        thin = (n + m) * min(n, m, rank)
        total += thin if len(shape) > 1 and 2 * (n + m) * rank < n * m else n * m
    return total


def _muons(shapes: Shapes, run: RunSpec, ranks: int) -> list[Traffic]:
    """What Muon sends where ranks have rows of its matrices: its momenta, so that each matrix is whole on one rank, and
    the rows of what comes of it back (`train.muon`). Experts are whole matrices already."""
    if run.optimizer.name != "muon" or ranks == 1:
        return []
    alike = Counter(shape for name, shape in shapes.items() if len(shape) == 2 and muon_trains(name, shape))
    gathered = sum(count * owned_elements(shape, ranks) for shape, count in alike.items())
    returned = sum(-(-count // ranks) * elements(shape) for shape, count in alike.items())
    size = COMPUTED["fp64" if run.training.precision == "fp64" else "bf16"] * (gathered + returned)
    why = "Muon's momenta, to whole matrices and back"
    return [Traffic("all_to_all", sent_bytes("all_to_all", size, ranks), why, calls=2 * len(alike))]


def _served(shapes: Shapes, layout: Layout, kept: int, workers: int) -> dict[str, list[Traffic]]:
    """Servers broadcast what they own (asynchronously they send it to each worker), workers send gradients back."""
    servers, whole = layout.servers, kept * sum(map(elements, shapes.values()))
    owned = kept * max(server_loads(shapes, servers))
    down = Traffic("broadcast", owned, "weights", "servers")
    up = Traffic("broadcast", whole, "weights", "servers", servers)
    if layout.staleness is not None:
        down = Traffic("send", workers * owned, "weights", "servers", workers)
        up = Traffic("recv", whole, "weights", "servers", servers)
    return {
        "server": [down, Traffic("recv", workers * owned, "gradients", "servers", workers)],
        "worker": [up, Traffic("send", whole, "gradients", "servers", servers)],
    }


def server_loads(shapes: Shapes, servers: int) -> list[int]:
    """Numbers that each server owns."""
    sizes, loads = {name: elements(shape) for name, shape in shapes.items()}, [0] * servers
    for name, server in spread(sizes, servers).items():
        loads[server] += sizes[name]
    return loads


def _padded(shapes: Shapes, ranks: int) -> int:
    return sum(ranks * owned_elements(shape, ranks) for shape in shapes.values())


def _merged(traffic: list[Traffic]) -> list[Traffic]:
    """Rows of the same operation and purpose added up."""
    total: dict[tuple[str, str], Traffic] = {}
    for row in traffic:
        more = total.get((row.operation, row.why), Traffic(row.operation, 0, row.why, calls=0))
        total[row.operation, row.why] = replace(more, bytes=more.bytes + row.bytes, calls=more.calls + row.calls)
    return list(total.values())
