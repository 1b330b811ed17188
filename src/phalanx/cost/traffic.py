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

    Exact but for what is smaller than a kilobyte (sums of losses and norms); of PowerSGD what steps send once it
    compresses. Rows that ranks share unevenly are sent with padding, and counted so. Raises UserError if the layout
    cannot run on so many ranks.
    """
    layout, precision = run.layout, run.training.precision
    cut, sizes, shapes = cut_batch(run, world_size), degrees(layout, world_size), parameter_shapes(run.model)
    computed, kept = COMPUTED[precision], KEPT[precision]
    if layout.data == "parameter_server":
        return _served(shapes, layout, kept, sizes.dp)
    if sizes.dp == 1:
        return {"rank": []}
    whole = _padded(shapes, sizes.dp_shard)
    if layout.data == "ddp":
        sent = {"none": kept * whole, "bf16": 2 * whole, "powersgd": kept * _powersgd(shapes, layout.compress_rank)}
        return {"rank": update_traffic("ddp", kept * whole, sent[layout.compress], sizes.dp)}
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
