"""State of a rank from step to step: parameters, gradients, optimizer state; and its offload."""

from __future__ import annotations

from phalanx.cost.exact.model_state import (
    NUM_OPTIMIZER_STATES,
    StateBytes,
    optimizer_kind,
    sharded_state_bytes,
)
from phalanx.cost.formulas.collectives import Strategy
from phalanx.cost.precision import COMPUTE_BYTES, STATE_BYTES
from phalanx.program.rank_tensors import RankTensors
from phalanx.spec.layout import FSDP_STRATEGIES, SHARDED_STRATEGIES, ZERO_STRATEGIES
from phalanx.spec.parameter_shapes import Shapes, is_muon_parameter, num_elements
from phalanx.spec.precision import BF16_PRECISIONS
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.spec.tensor_sharding import has_strided_shards, max_shard_elements


def rank_model_state(resolved: ResolvedRun, rank: RankTensors) -> StateBytes:
    """Return the bytes that a rank retains from step to step, before offload."""
    run = resolved.run
    strategy = resolved.strategy
    precision = run.training.precision
    total = StateBytes(0, 0, 0)
    for shapes, shards in _trained_by_shards(rank):
        # On one rank, ZeRO-3 splits nothing. A parameter server has the optimizer state of its workers.
        full_count, _ = owned_counts(shapes, run, 1)
        owned, states = owned_counts(shapes, run, 1 if strategy == "ddp" else shards)
        total += sharded_state_bytes(
            strategy,
            precision,
            full_count,
            owned=owned,
            states=0 if strategy == "parameter_server" else states,
            micro_batches=resolved.micro_batches,
        )
        if strategy in ZERO_STRATEGIES and precision not in BF16_PRECISIONS and run.layout.offload == "none":
            # These rows are trained in a copy.
            strided = {name: shape for name, shape in shapes.items() if has_strided_shards(shape, shards)}
            total += StateBytes(0, 0, STATE_BYTES[precision] * owned_counts(strided, run, shards)[0])
    bytes_per_element = (STATE_BYTES if strategy == "ddp" else COMPUTE_BYTES)[precision]  # ddp computes by autocast
    copied_bytes = 0 if rank.embedding_copy is None else bytes_per_element * num_elements(rank.embedding_copy)
    parameters = total.parameters + copied_bytes + carried_bytes(run, rank) + frozen_bytes(resolved, rank)
    return StateBytes(parameters, total.gradients, total.optimizer)


def _trained_by_shards(rank: RankTensors) -> tuple[tuple[Shapes, int], ...]:
    """Return the trained tensors of a rank, and the number of ranks that shard their rows: dense ones, and experts."""
    of_dense, of_experts = (rank.without_frozen(shapes) for shapes in (rank.dense, rank.expert))
    return (of_dense, rank.shards), (of_experts, rank.expert_shards)


def frozen_bytes(resolved: ResolvedRun, rank: RankTensors) -> int:
    """Return the bytes of a rank's frozen parameters, of which only ZeRO-3 has shards.

    ZeRO has them in the precision of their computation, if they are not quantized."""
    is_sharded = resolved.strategy in FSDP_STRATEGIES
    size = (COMPUTE_BYTES if resolved.strategy in SHARDED_STRATEGIES else STATE_BYTES)[resolved.run.training.precision]
    shapes = rank.all
    return sum(
        rank.itemsize(name, size) * max_shard_elements(shapes[name], rank.shards_of(name) if is_sharded else 1)
        for name in rank.frozen
    )


def carried_bytes(run: RunSpec, rank: RankTensors) -> int:
    """Return the bytes of a rank's tensors that are not trained, which no strategy divides, casts or offloads."""
    return STATE_BYTES[run.training.precision] * sum(map(num_elements, rank.carried.values()))


def resident_and_offloaded(resolved: ResolvedRun, rank: RankTensors) -> tuple[StateBytes, int, int]:
    """Return a rank's state on its device, its offloaded bytes, and the part of these in files."""
    run = resolved.run
    state = rank_model_state(resolved, rank)
    if run.layout.offload == "none":
        return state, 0, 0
    owned = sum(owned_counts(shapes, run, shards)[0] for shapes, shards in _trained_by_shards(rank))
    row_bytes = 0 if run.training.precision in BF16_PRECISIONS else STATE_BYTES[run.training.precision] * owned
    carried = StateBytes(carried_bytes(run, rank), 0, 0)
    state = StateBytes(state.parameters - carried.parameters, state.gradients, state.optimizer)
    resident, offloaded = _split_offloaded(resolved.strategy, state, row_bytes)
    # FSDP2 keeps parameters and gradients in CPU memory; Phalanx can store only the optimizer state in files.
    on_disk = state.optimizer if resolved.strategy in FSDP_STRATEGIES else offloaded
    return resident + carried, offloaded, on_disk if run.layout.offload == "nvme" else 0


def checkpoint_copy_bytes(resolved: ResolvedRun, rank: RankTensors) -> int:
    """Return the bytes of CPU memory for a rank's copy of its parameters and optimizer state.

    Checkpoints are written from this copy while training continues (`train.checkpoint.host_copies`). A rank has one
    copy, because a save waits for the previous save. The copy of GPU tensors is page-locked and reused by the next
    save. Tensors that are offloaded to CPU memory are copied too. With files (`offload = "nvme"`) a save makes no copy.
    """
    run = resolved.run
    strategy = resolved.strategy
    if run.layout.offload == "nvme":
        return 0
    untrained_bytes = carried_bytes(run, rank) + frozen_bytes(resolved, rank)
    if strategy == "parameter_server":  # servers have the rest
        return untrained_bytes
    counts = [
        owned_counts(shapes, run, 1 if strategy == "ddp" else shards) for shapes, shards in _trained_by_shards(rank)
    ]
    return STATE_BYTES[run.training.precision] * sum(map(sum, counts)) + untrained_bytes


def owned_counts(shapes: Shapes, run: RunSpec, ranks: int) -> tuple[int, int]:
    """Return the parameters of the first of `ranks` that shard all rows, and its optimizer states.

    With Muon, AdamW trains all but the blocks' matrices.
    """
    optimizer = optimizer_kind(run.optimizer)
    num_owned = num_states = 0
    for name, shape in shapes.items():
        count = max_shard_elements(shape, ranks)
        num_owned += count
        is_adamw = optimizer == "muon" and not is_muon_parameter(name, shape)
        num_states += count * NUM_OPTIMIZER_STATES["adamw" if is_adamw else optimizer]
    return num_owned, num_states


def _split_offloaded(strategy: Strategy, state: StateBytes, row_bytes: int) -> tuple[StateBytes, int]:
    """Return the state that offload leaves on the device, and the offloaded bytes.

    ZeRO-1 offloads all trained rows and their state, ZeRO-2 also the gradients, and ZeRO-3 everything. `row_bytes`
    counts the rows if the model's own rows would otherwise be trained.
    """
    if strategy in FSDP_STRATEGIES:
        return StateBytes(0, 0, 0), state.total
    resident = StateBytes(state.parameters, state.gradients if strategy == "zero1" else 0, 0)
    return resident, state.total - resident.total + row_bytes
