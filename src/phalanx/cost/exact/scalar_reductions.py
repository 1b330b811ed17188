"""Traffic of scalars that ranks reduce in every step: token counts, losses and norms."""

from __future__ import annotations

from phalanx.cost.formulas.collectives import Traffic, sent_bytes
from phalanx.cost.precision import COMPUTE_BYTES
from phalanx.program.rank_tensors import RankTensors, rank_tensors
from phalanx.schedule.registry import representative_schedule
from phalanx.spec.communication_groups import GroupKind
from phalanx.spec.layers import expert_layers
from phalanx.spec.layout import SHARDED_STRATEGIES
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.spec.tensor_sharding import parameter_shardings

NUM_SCALARS = 9
"""Number of scalars that ranks sum in every step (`train.step_sums.StepSums`)."""
REDUCTION_PURPOSE = "sums of losses and tokens, and the gradient's norm"


def num_reduced_scalars(run: RunSpec) -> int:
    """Return the number of summed scalars: `NUM_SCALARS`, loss and targets of each source, loads of all experts.

    A run on preferences has more, and one with a teacher.
    """
    num_losses = 2 * len(run.data.source) + num_preference_sums(run) + num_distillation_sums(run)
    return NUM_SCALARS + num_losses + num_expert_loads(run)


def num_preference_sums(run: RunSpec) -> int:
    """Return the number of summed scalars of preferences: of pairs, of correct ones, and of margins."""
    return 0 if run.preference is None else 3


def num_distillation_sums(run: RunSpec) -> int:
    """Return the number of summed scalars of distillation: the divergence."""
    return int(run.distillation is not None)


def num_expert_loads(run: RunSpec) -> int:
    """Return the number of experts of all layers."""
    experts = run.model.moe.num_experts if run.model.moe else 0
    return experts * len(expert_layers(run.model))


def scalar_reduction_traffic(resolved: ResolvedRun, pp_rank: int) -> list[Traffic]:
    """Return the scalar traffic of a pipeline rank in one update.

    Parameter servers receive scalars with the gradients (`verify.parameter_server_traffic`).
    """
    run = resolved.run
    layout = run.layout
    dims = resolved.dims
    scalar_bytes = 8 * num_reduced_scalars(run)
    schedule = representative_schedule(layout)
    has_loss = layout.pp == 1 or schedule.stages - 1 in schedule.stages_of(pp_rank)
    bytes_per_element = max(4, COMPUTE_BYTES[run.training.precision])
    rows = [
        _all_reduce_traffic("losses", scalar_bytes, dims.dp_size * dims.cp * dims.pp),
        _all_reduce_traffic("tp", scalar_bytes, dims.tp),
    ]
    norms = _norm_reduction_groups(run, rank_tensors(resolved)[pp_rank])
    rows += [_all_reduce_traffic(group_kind, bytes_per_element, ranks) for group_kind, ranks in norms]
    rows.append(_all_reduce_traffic("pp", bytes_per_element, dims.pp))
    if run.model.moe and layout.sequence_parallel:  # each rank's routers process some of the tokens
        num_stages = len(schedule.stages_of(pp_rank)) if layout.pp > 1 else 1
        rows += resolved.micro_batches * num_stages * [_all_reduce_traffic("tp", bytes_per_element, dims.tp)]
    if run.preference is not None and has_loss:
        # Sums over the answers of a micro-batch, of which a row has at least two.
        sums_bytes = 8 * 2 * resolved.batch.micro_batch_size
        rows += resolved.micro_batches * [_all_reduce_traffic("cp", sums_bytes, dims.cp)]
    return [row for row in rows if row.bytes]


def _all_reduce_traffic(group_kind: GroupKind, size: int, ranks: int) -> Traffic:
    return Traffic("all_reduce", sent_bytes("all_reduce", size, ranks), REDUCTION_PURPOSE, group_kind)


def _norm_reduction_groups(run: RunSpec, rank: RankTensors) -> list[tuple[GroupKind, int]]:
    """Return the groups over which squared gradients are summed, once for all tensors with equal sharding.

    `parallel.grad_norm.global_grad_norm` does the sums.
    """
    layout = run.layout
    sharded = layout.data_parallel in SHARDED_STRATEGIES
    group_sets: set[tuple[tuple[GroupKind, int], ...]] = set()
    shardings = parameter_shardings(run.model, layout)
    for name in rank.trained:
        sharding = shardings[name]
        split = list[tuple[GroupKind, int]]()
        if sharding.dim is not None:
            ranks = layout.ep if sharding.mesh_axis == "ep" else layout.tp // sharding.replication
            split.append(("parts" if sharding.replication > 1 else sharding.mesh_axis, ranks))
        if sharded:
            split.append(("same_experts", rank.expert_shards) if name in rank.expert else ("data", rank.shards))
        group_sets.add(tuple(split))
    return [group for groups in group_sets for group in groups]
