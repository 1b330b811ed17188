"""The little that ranks tell each other in every step beside tensors: how many tokens, what loss, what norm."""

from __future__ import annotations

from phalanx.cost.exact.rank_tensors import RankTensors, rank_tensors
from phalanx.cost.formulas.collectives import Traffic, sent_bytes
from phalanx.cost.precision import COMPUTE_BYTES
from phalanx.schedule.registry import representative_schedule
from phalanx.spec.batch import plan_batch
from phalanx.spec.communication_groups import GroupKind
from phalanx.spec.degrees import parallel_dims
from phalanx.spec.layout import SHARDED_STRATEGIES
from phalanx.spec.run import RunSpec
from phalanx.spec.tensor_sharding import tensor_sharding

NUM_SCALARS = 6
"""Numbers that ranks sum in every step: tokens, losses, whether and when to stop, choices dropped (`train.learner`)."""
WHY = "sums of losses and tokens, and the gradient's norm"


def num_reduced_scalars(run: RunSpec) -> int:
    """These, and the load of each expert of each layer."""
    experts = run.model.moe.num_experts if run.model.moe else 0
    return NUM_SCALARS + experts * sum(map(run.model.is_moe_layer, range(run.model.num_layers)))


def scalar_reduction_traffic(run: RunSpec, world_size: int, place: int) -> list[Traffic]:
    """What a rank at this place of the pipeline sends for them in one update. (What parameter servers are
    told comes with gradients: `verify.served`.)"""
    layout, sizes, cut = run.layout, parallel_dims(run.layout, world_size), plan_batch(run, world_size)
    summed, number = 8 * num_reduced_scalars(run), max(4, COMPUTE_BYTES[run.training.precision])
    found = [_one("losses", summed, sizes.dp_size * sizes.cp * sizes.pp), _one("tp", summed, sizes.tp)]
    norms = _norms(run, rank_tensors(run, world_size)[place])
    found += [_one(among, number, ranks) for among, ranks in norms]
    found.append(_one("pp", number, sizes.pp))
    if run.model.moe and layout.sequence_parallel:  # each rank's routers saw some of the tokens
        stages = len(representative_schedule(layout).stages_of(place)) if layout.pp > 1 else 1
        found += cut.gradient_accumulation_steps * stages * [_one("tp", number, sizes.tp)]
    return [row for row in found if row.bytes]


def _one(among: GroupKind, size: int, ranks: int) -> Traffic:
    return Traffic("all_reduce", sent_bytes("all_reduce", size, ranks), WHY, among)


def _norms(run: RunSpec, rank: RankTensors) -> list[tuple[GroupKind, int]]:
    """Over which ranks the squares of gradients are summed, once for all tensors that are split alike
    (`parallel.gradient.global_norm`)."""
    layout = run.layout
    sharded = layout.data_parallel in SHARDED_STRATEGIES
    kinds: set[tuple[tuple[GroupKind, int], ...]] = set()
    for name in rank.names:
        share, split = tensor_sharding(run.model, layout, name), list[tuple[GroupKind, int]]()
        if share.dim is not None:
            ranks = layout.ep if share.mesh_axis == "ep" else layout.tp // share.replication
            split.append(("parts" if share.replication > 1 else share.mesh_axis, ranks))
        if sharded:
            split.append(("same_experts", rank.expert_shards) if name in rank.expert else ("data", rank.shards))
        kinds.add(tuple(split))
    return [each for kind in kinds for each in kind]
