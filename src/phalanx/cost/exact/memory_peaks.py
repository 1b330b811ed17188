"""Bytes at the times of a step at which a rank's memory can peak.

The parts of memory peak at different times. Gradients are allocated while activations are freed, communication buffers
exist while they are used, and the optimizer's workspace exists after activations are freed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from phalanx.cost.exact.activation_bytes import ActivationBytes
from phalanx.cost.exact.block_moments import WeightGradients
from phalanx.cost.exact.comm_buffer_peak import CommBufferPeak
from phalanx.cost.exact.forward_shape import INDEX_BYTES
from phalanx.cost.exact.in_flight_memory import PeakInFlightBytes
from phalanx.cost.exact.model_state import StateBytes, zero_gradient_bytes
from phalanx.cost.formulas.collectives import Strategy
from phalanx.cost.precision import COMPUTE_BYTES, STATE_BYTES
from phalanx.program.buckets import PIECE_BYTES, chunk_by_bytes, zero_bucket_names
from phalanx.program.rank_tensors import RankTensors
from phalanx.spec.layout import FSDP_STRATEGIES, MAX_BF16_SUMS, ZERO_STRATEGIES
from phalanx.spec.parameter_shapes import is_muon_parameter, num_elements
from phalanx.spec.parts.operations import Shape
from phalanx.spec.parts.per_layer_inputs import NAME as LAYER_INPUTS
from phalanx.spec.precision import BF16_PRECISIONS
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.tensor_sharding import has_strided_shards, max_shard_elements

LAYER_INPUT_TABLE = f"{LAYER_INPUTS}.embedding.weight"


@dataclass(frozen=True, kw_only=True)
class PersistentMemory:
    """Bytes that remain while activations and buffers are allocated and freed."""

    parameters_and_optimizer: int
    """Parameters and optimizer state."""
    inputs: int
    """Tokens, targets and documents of all micro-batches of a step, which are on the device from its start."""
    gradients: int
    """Gradients at the end of a step."""
    accumulated_gradients: int
    """Part of `gradients` that exists before the last micro-batch's backward pass, and until the end."""
    pipeline_gradients: int
    """Part of `gradients` in which the micro-batches of a pipeline accumulate, before the end of the step."""
    weight_gradient: int
    """Bytes of the gradient of a weight until it is added to a sum of full gradients; 0 where a buffer contains it."""
    last_gradients: int
    """Bytes of the gradients with which a backward pass ends in a model whose layers have inputs, until they are added
    to sums; 0 where a buffer contains them."""
    held_gradient: int
    """Bytes of the gradient of a tied head, which waits for that of the embedding."""
    optimizer_workspace: int
    """Temporary bytes of the optimizer, in addition to its state."""

    @property
    def always(self) -> int:
        """Bytes that exist at all times of a step."""
        return self.parameters_and_optimizer + self.inputs


def split_persistent_memory(resolved: ResolvedRun, rank: RankTensors, state: StateBytes) -> PersistentMemory:
    """Split a rank's state on its device by the time at which it exists.

    DDP's buckets exist all the time, and a parameter server's worker accumulates in place. Other strategies free
    gradients after use. If a step leaves parts unused, DDP frees their gradients, and all micro-batches before the last
    allocate them outside the buckets. In a pipeline, ZeRO-3 accumulates full gradients.
    """
    run = resolved.run
    layout = run.layout
    strategy = resolved.strategy
    accumulation = resolved.micro_batches
    gradients = state.gradients
    has_buckets = strategy == "ddp" and resolved.data_dims.dp_size > 1 and layout.pp == 1
    num_gradient_sets = max(has_buckets, accumulation > 1) + (
        has_buckets and layout.ddp_find_unused_parameters and accumulation > 1
    )
    summed_bytes = gradients
    if strategy in FSDP_STRATEGIES and layout.pp > 1:
        summed_bytes = STATE_BYTES[run.training.precision] * sum(map(num_elements, rank.trained.values()))
    if (
        rank.embedding_copy is not None and "embedding.weight" not in rank.frozen
    ):  # its gradient, until it is sent to the rank that trains it
        summed_bytes += COMPUTE_BYTES[run.training.precision] * num_elements(rank.embedding_copy)
    before_bytes = gradients if strategy == "parameter_server" else num_gradient_sets * gradients
    return PersistentMemory(
        parameters_and_optimizer=state.parameters + state.optimizer,
        inputs=_input_bytes(resolved),
        gradients=gradients,
        accumulated_gradients=before_bytes,
        pipeline_gradients=summed_bytes,
        weight_gradient=weight_gradients(resolved).own,
        last_gradients=_last_gradient_bytes(resolved, rank),
        held_gradient=_held_gradient_bytes(resolved, rank),
        optimizer_workspace=optimizer_step_bytes(resolved, rank) + gradient_cast_bytes(resolved, rank),
    )


def _held_gradient_bytes(resolved: ResolvedRun, rank: RankTensors) -> int:
    """Return the bytes of the gradient of a tied head that exist inside the blocks, in addition to sums of gradients.

    FSDP's root keeps them among its gradients. Stages of a pipeline are graphs of their own."""
    run = resolved.run
    is_trained = "embedding.weight" not in rank.frozen
    if not (run.model.tie_embeddings and is_trained) or run.layout.pp > 1 or resolved.strategy in FSDP_STRATEGIES:
        return 0
    return _gradient_itemsize(resolved) * num_elements(rank.dense["embedding.weight"])


def _gradient_itemsize(resolved: ResolvedRun) -> int:
    """Return the bytes of a number of a gradient of the model's parameters, without FSDP."""
    size = COMPUTE_BYTES if resolved.strategy in ZERO_STRATEGIES else STATE_BYTES
    return size[resolved.run.training.precision]


def weight_gradients(resolved: ResolvedRun) -> WeightGradients:
    """Return the bytes of a number of the gradients of weights inside a block.

    A unit of FSDP sends them together, or in a pipeline casts them together to the dtype of their sum; other strategies
    add each to a sum at once. ZeRO-2 without a pipeline has them in the buffer of the next bucket. On CUDA they are not
    counted."""
    run = resolved.run
    strategy = resolved.strategy
    size = 0 if run.cluster.uses_cuda else COMPUTE_BYTES[run.training.precision]
    if strategy in FSDP_STRATEGIES and (run.layout.pp == 1 or run.training.precision in BF16_PRECISIONS):
        return WeightGradients(block=size)
    return WeightGradients(own=0 if strategy == "zero2" and run.layout.pp == 1 else size)


def _last_gradient_bytes(resolved: ResolvedRun, rank: RankTensors) -> int:
    """Return the bytes of the gradient of the table of the inputs of layers, which may be most of the model.

    That of a tied embedding has waited since the head's backward pass."""
    shapes = rank.trained
    strategy = resolved.strategy
    if LAYER_INPUT_TABLE not in shapes or strategy in FSDP_STRATEGIES or strategy == "zero2":
        return 0
    table_bytes = _gradient_itemsize(resolved) * num_elements(shapes[LAYER_INPUT_TABLE])
    return table_bytes + _held_gradient_bytes(resolved, rank)


def _input_bytes(resolved: ResolvedRun) -> int:
    """Return the bytes of a rank's tokens and targets, and of the start of each token's document, in full rows."""
    run = resolved.run
    rows = -(-resolved.batch.global_batch_size // resolved.batch.dp_size)
    local_tokens = rows * run.training.seq_len // run.layout.cp
    start_bytes = 4 * rows * run.training.seq_len if run.data.mask_documents else 0
    return 2 * INDEX_BYTES * local_tokens + start_bytes


def memory_peaks(
    persistent: PersistentMemory, buffer_peaks: list[CommBufferPeak], activations: ActivationBytes, cuda_exchange: int
) -> Iterator[int]:
    """Yield the bytes at the start and end of backward, at each communication, and at the update.

    Args:
        persistent: Bytes that remain.
        buffer_peaks: Communication buffers and their times.
        activations: Activations of a micro-batch.
        cuda_exchange: Bytes of model-parallel communication inside blocks on CUDA; on a CPU the activations contain it.
    """
    own_bytes = persistent.weight_gradient
    own = WeightGradients(own=own_bytes)
    start_bytes = max(activations.at_backward_start, activations.within_blocks(0.0, own) + cuda_exchange)
    yield persistent.always + persistent.accumulated_gradients + start_bytes
    for peak in buffer_peaks:
        done = peak.backward_fraction if peak.gradient_fraction is None else peak.gradient_fraction
        gradient_bytes = max(persistent.accumulated_gradients, round(done * persistent.gradients))
        gradient_bytes = round(peak.kept_gradients * gradient_bytes)
        gradients = WeightGradients(own=own_bytes, block=peak.weight_gradient_bytes)
        match peak.moment:
            case "backward_start":
                block_bytes = start_bytes
            case "in_loss":
                block_bytes = activations.total + activations.loss
            case "in_head":
                block_bytes = activations.total + activations.head_gradients
            case "inside_block":
                block_bytes = activations.within_blocks(peak.backward_fraction, gradients) + cuda_exchange
            case "inside_mlp":
                block_bytes = activations.within_mlp(peak.backward_fraction, gradients)
            case "inside_attention":
                block_bytes = activations.within_attention(peak.backward_fraction, gradients)
            case "after_experts":
                block_bytes = activations.after_experts(peak.backward_fraction)
            case "in_dispatch":
                block_bytes = activations.within_dispatch(peak.backward_fraction)
            case "after_block":
                block_bytes = activations.between_blocks(peak.backward_fraction)
            case "in_update":
                block_bytes = 0
        if peak.moment.startswith(("inside", "after", "in_dispatch")) and 0 < done < 1 and peak.kept_gradients:
            block_bytes += persistent.held_gradient
        yield persistent.always + gradient_bytes + block_bytes + peak.bytes
    if activations.prefetched:
        done = activations.prefetch_end
        gradient_bytes = max(persistent.accumulated_gradients, round(done * persistent.gradients))
        block_bytes = activations.within_blocks(done, own) + persistent.held_gradient
        yield persistent.always + gradient_bytes + block_bytes + cuda_exchange
    end_gradient_bytes = max(persistent.accumulated_gradients, persistent.gradients)
    held_bytes = persistent.held_gradient if persistent.accumulated_gradients else 0  # else it is one of the gradients
    block_bytes = activations.within_blocks(1.0, own) + cuda_exchange + held_bytes
    last_bytes = activations.layer_input_gradients + persistent.last_gradients
    yield persistent.always + end_gradient_bytes + max(block_bytes, last_bytes)
    yield persistent.always + end_gradient_bytes + persistent.optimizer_workspace


def pipeline_memory_peaks(
    persistent: PersistentMemory, buffer_peaks: list[CommBufferPeak], passes: PeakInFlightBytes, links: int
) -> Iterator[int]:
    """Yield the bytes of a pipeline rank in passes without and with gradients, and at the end of the step.

    Args:
        persistent: Bytes that remain.
        buffer_peaks: Communication buffers and their times.
        passes: Peak activations of the rank.
        links: Bytes of messages between stages.
    """
    gathered_bytes = [peak.bytes for peak in buffer_peaks if peak.moment == "backward_start"]
    working_bytes = links + max(gathered_bytes, default=0)
    for fraction, activation_bytes in passes.by_gradients.items():
        gradient_bytes = round(fraction * persistent.pipeline_gradients)
        yield persistent.always + gradient_bytes + activation_bytes + working_bytes
    for peak in buffer_peaks:
        yield persistent.always + round(peak.kept_gradients * persistent.pipeline_gradients) + peak.bytes
    yield persistent.always + persistent.gradients + persistent.optimizer_workspace


def without_other_streams(
    persistent: PersistentMemory, buffer_peaks: list[CommBufferPeak]
) -> tuple[PersistentMemory, list[CommBufferPeak]]:
    """Return the part of both arguments that is on the compute stream.

    On CUDA, FSDP2 gathers and accumulates gradients on other streams.
    """
    computing = [replace(peak, bytes=peak.bytes - peak.gather_stream_bytes) for peak in buffer_peaks]
    return replace(persistent, gradients=0, accumulated_gradients=0), computing


def gradient_cast_bytes(resolved: ResolvedRun, rank: RankTensors) -> int:
    """Return the temporary bytes of the fp32 gradients that ZeRO-1 and 2 step with, in addition to the bf16 gradients.

    They step in pieces (`PIECE_BYTES`), and drop the gradients of each. Offloaded gradients are cast in CPU memory, and
    those of many micro-batches are fp32 already: only those are copied that are strided in ZeRO-1's full gradients.
    """
    run = resolved.run
    strategy = resolved.strategy
    accumulation = resolved.micro_batches
    precision = run.training.precision
    if strategy not in ZERO_STRATEGIES or run.layout.offload != "none":
        return 0
    rows = _owned_elements(rank, strategy)
    shapes = rank.all
    is_cast = precision in BF16_PRECISIONS and accumulation <= MAX_BF16_SUMS

    def is_copied(name: str) -> bool:
        return is_cast or (strategy == "zero1" and has_strided_shards(shapes[name], rank.shards_of(name)))

    def row_bytes(bucket: list[str]) -> int:
        return STATE_BYTES[precision] * sum(rows[name] for name in bucket)

    buckets = zero_bucket_names(rank, run.layout, COMPUTE_BYTES[precision])
    kept = {name: num_elements(shape) for name, shape in shapes.items()} if strategy == "zero1" else rows
    most = dropped = 0
    for piece in chunk_by_bytes(buckets[::-1], PIECE_BYTES[run.layout.offload], row_bytes):
        names = [name for bucket in piece for name in bucket]
        most = max(most, row_bytes(list(filter(is_copied, names))) - dropped)
        dropped += zero_gradient_bytes(precision, accumulation) * sum(kept[name] for name in names)
    return most


def optimizer_step_bytes(resolved: ResolvedRun, rank: RankTensors) -> int:
    """Return the temporary bytes of an optimizer step.

    SGD with weight decay needs a copy of the gradients. Muon needs the momenta of the largest group of matrices with
    equal shape, and about five copies of the group in the compute dtype (`train.optim.muon`). On a CPU it needs two
    copies of the group and five of one matrix in fp32. Fused AdamW needs nothing.
    """
    run = resolved.run
    strategy = resolved.strategy
    if strategy == "parameter_server" or run.optimizer.name == "adamw":
        return 0
    state_bytes = STATE_BYTES[run.training.precision]
    owned_elements = _owned_elements(rank, strategy)
    if run.optimizer.name == "sgd":
        return state_bytes * sum(owned_elements.values()) if run.optimizer.weight_decay else 0
    groups = Counter[Shape]()
    for name, shape in rank.trained.items():
        if is_muon_parameter(name, shape):
            groups[shape] += owned_elements[name]
    compute_bytes = 8 if run.training.precision == "fp64" else 2
    group_copies, matrix_copies = (5, 0) if run.cluster.uses_cuda else (2, 5)
    matrix_bytes = max(4, compute_bytes)
    return max(
        (
            (state_bytes + group_copies * compute_bytes) * elements
            + matrix_copies * matrix_bytes * math.prod(shape[-2:])
            for shape, elements in groups.items()
        ),
        default=0,
    )


def _owned_elements(rank: RankTensors, strategy: Strategy) -> dict[str, int]:
    """Return the elements of each parameter that the rank trains."""
    return {
        name: max_shard_elements(shape, 1 if strategy == "ddp" else rank.shards_of(name))
        for name, shape in rank.trained.items()
    }
