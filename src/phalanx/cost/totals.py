"""The little that ranks tell each other in every step beside tensors: how many tokens, what loss, what norm."""

from __future__ import annotations

from phalanx.cost.network import Among, Traffic, sent_bytes
from phalanx.cost.precision import COMPUTED
from phalanx.cost.shares import Held, rank_shapes
from phalanx.schedule.named import any_schedule_of
from phalanx.spec.layout import SHARDED, degrees
from phalanx.spec.run import RunSpec, cut_batch
from phalanx.spec.share import tensor_share

SUMS = 6
"""Numbers that ranks sum in every step: tokens, losses, whether and when to stop, choices dropped (`train.learner`)."""
WHY = "sums of losses and tokens, and the gradient's norm"


def summed_numbers(run: RunSpec) -> int:
    """These, and the load of each expert of each layer."""
    experts = run.model.moe.experts if run.model.moe else 0
    return SUMS + experts * sum(map(run.model.is_moe, range(run.model.layers)))


def step_totals(run: RunSpec, world_size: int, place: int) -> list[Traffic]:
    """What a rank at this place of the pipeline sends for them in one update. (What parameter servers are
    told comes with gradients: `verify.served`.)"""
    layout, sizes, cut = run.layout, degrees(run.layout, world_size), cut_batch(run, world_size)
    summed, number = 8 * summed_numbers(run), max(4, COMPUTED[run.training.precision])
    found = [_one("losses", summed, sizes.dp * sizes.cp * sizes.pp), _one("tp", summed, sizes.tp)]
    norms = _norms(run, rank_shapes(run, world_size)[place])
    found += [_one(among, number, ranks) for among, ranks in norms]
    found.append(_one("pp", number, sizes.pp))
    if run.model.moe and layout.sequence_parallel:  # each rank's routers saw some of the tokens
        stages = len(any_schedule_of(layout).stages_of(place)) if layout.pp > 1 else 1
        found += cut.accumulation * stages * [_one("tp", number, sizes.tp)]
    return [row for row in found if row.bytes]


def _one(among: Among, size: int, ranks: int) -> Traffic:
    return Traffic("all_reduce", sent_bytes("all_reduce", size, ranks), WHY, among)


def _norms(run: RunSpec, rank: Held) -> list[tuple[Among, int]]:
    """Over which ranks the squares of gradients are summed, once for all tensors that are split alike
    (`parallel.gradient.global_norm`)."""
    layout = run.layout
    sharded = layout.data in SHARDED
    kinds: set[tuple[tuple[Among, int], ...]] = set()
    for name in rank.names:
        share, split = tensor_share(run.model, layout, name), list[tuple[Among, int]]()
        if share.axis is not None:
            ranks = layout.ep if share.among == "ep" else layout.tp // share.copies
            split.append(("parts" if share.copies > 1 else share.among, ranks))
        if sharded:
            split.append(("same_experts", rank.apart_shards) if name in rank.apart else ("data", rank.shards))
        kinds.add(tuple(split))
    return [each for kind in kinds for each in kind]
