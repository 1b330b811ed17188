"""What each rank of a run sends in one optimizer update: the formulas of `network.py` for its model and layout."""

from __future__ import annotations

from collections import Counter, defaultdict

from phalanx.cost.network import Traffic, sent_bytes, update_traffic
from phalanx.cost.precision import COMPUTED, KEPT
from phalanx.cost.shapes import Shapes, elements, muon_trains, owned_elements, parameter_shapes
from phalanx.spec.layout import Layout, degrees, spread
from phalanx.spec.run import RunSpec, cut_batch


def run_traffic(run: RunSpec, world_size: int) -> dict[str, list[Traffic]]:
    """Traffic by role: of "rank", or with a parameter server of "server" (the fullest) and "worker".

    Exact but for what is smaller than a kilobyte (sums of losses and norms). Rows that ranks share unevenly are sent
    with padding, and counted so. Raises UserError if the layout cannot run on so many ranks.
    """
    layout, precision = run.parallel, run.training.precision
    cut, sizes, shapes = cut_batch(run, world_size), degrees(layout, world_size), parameter_shapes(run.model)
    computed, kept = COMPUTED[precision], KEPT[precision]
    if layout.data == "parameter_server":
        return _served(shapes, layout, kept, sizes.dp)
    if sizes.dp == 1:
        return {"rank": []}
    whole = _padded(shapes, sizes.dp_shard)
    if layout.data == "ddp":
        compressed = 2 if layout.compress == "bf16" else kept
        return {"rank": update_traffic("ddp", kept * whole, compressed * whole, sizes.dp)}
    muon = _muons(shapes, run, sizes.dp_shard)
    if layout.data in ("zero1", "zero2"):
        reduced = update_traffic(layout.data, computed * whole, computed * whole, sizes.dp, cut.accumulation)
        return {"rank": [*reduced, *muon]}
    blocks = {name: shape for name, shape in shapes.items() if name.startswith("blocks.") and layout.wrap != "model"}
    in_blocks = _padded(blocks, sizes.dp_shard)
    # The root's parameters (embedding, last norm, head) stay gathered between the two passes.
    parts = [(in_blocks, layout.reshard), (whole - in_blocks, False)]
    traffic = [
        row
        for count, reshard in parts
        for row in update_traffic(
            layout.data, computed * count, kept * count, sizes.dp_shard, cut.accumulation,
            replicas=sizes.dp_replicate, reshard_after_forward=reshard,
        )
    ]  # fmt: skip
    return {"rank": [*_merged(traffic), *muon]}


def _muons(shapes: Shapes, run: RunSpec, ranks: int) -> list[Traffic]:
    """What Muon sends where ranks have rows of its matrices: its momenta, so that each matrix is whole on one rank, and
    the rows of what comes of it back (`train.muon`). Experts are whole matrices already."""
    if run.optimizer.name != "muon" or ranks == 1:
        return []
    alike = Counter(shape for name, shape in shapes.items() if len(shape) == 2 and muon_trains(name, shape))
    gathered = sum(count * owned_elements(shape, ranks) for shape, count in alike.items())
    returned = sum(-(-count // ranks) * elements(shape) for shape, count in alike.items())
    size = COMPUTED["fp64" if run.training.precision == "fp64" else "bf16"] * (gathered + returned)
    return [Traffic("all_to_all", sent_bytes("all_to_all", size, ranks), "Muon's momenta, to whole matrices and back")]


def _served(shapes: Shapes, layout: Layout, kept: int, workers: int) -> dict[str, list[Traffic]]:
    """Servers broadcast what they own (asynchronously they send it to each worker), workers send gradients back."""
    whole = kept * sum(map(elements, shapes.values()))
    owner = spread({name: elements(shape) for name, shape in shapes.items()}, layout.servers)
    load: dict[int, int] = defaultdict(int)
    for name, shape in shapes.items():
        load[owner[name]] += kept * elements(shape)
    owned = max(load.values())
    if layout.staleness is None:
        down, up = Traffic("broadcast", owned, "weights"), Traffic("broadcast", whole, "weights")
    else:
        down, up = Traffic("send", workers * owned, "weights"), Traffic("recv", whole, "weights")
    return {
        "server": [down, Traffic("recv", workers * owned, "gradients")],
        "worker": [up, Traffic("send", whole, "gradients")],
    }


def _padded(shapes: Shapes, ranks: int) -> int:
    return sum(ranks * owned_elements(shape, ranks) for shape in shapes.values())


def _merged(traffic: list[Traffic]) -> list[Traffic]:
    """Rows of the same operation and purpose added up."""
    total: dict[tuple[str, str], Traffic] = {}
    for row in traffic:
        before = total.get((row.operation, row.why))
        total[row.operation, row.why] = Traffic(row.operation, row.bytes + (before.bytes if before else 0), row.why)
    return list(total.values())
