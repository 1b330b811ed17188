"""Bytes at the moments of a step at which a rank may hold most: parts of memory have their peaks at different times.

Gradients come while activations go, buffers of communication are there when they are used, and what the update needs
when activations are gone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from phalanx.cost.exact.activation_memory import ActivationBytes, PeakInFlightBytes
from phalanx.cost.exact.fsdp_buffers import CommBufferPeak
from phalanx.cost.exact.parameter_shapes import Shape, is_muon_parameter, max_shard_elements
from phalanx.cost.exact.rank_tensors import RankTensors
from phalanx.cost.formulas.collectives import Strategy
from phalanx.cost.precision import STATE_BYTES
from phalanx.spec.run import RunSpec


@dataclass(frozen=True)
class PersistentMemory:
    """Bytes that stay while activations and buffers come and go."""

    parameters_and_optimizer: int
    """Parameters and optimizer state."""
    gradients: int
    """Of a step, at its end."""
    accumulated_gradients: int
    """Of gradients, what is there before the backward pass of a step's last micro-batch, and until the end."""
    pipeline_gradients: int
    """Of gradients, what micro-batches of a pipeline add up in, before the step's end."""
    optimizer_workspace: int
    """What the optimizer needs beside its state."""


def memory_peaks(
    persistent: PersistentMemory, buffer_peaks: list[CommBufferPeak], activations: ActivationBytes, exchange: int
) -> Iterator[int]:
    """When the backward pass begins, at every moment of sending, when it ends, and at the update. `exchange` is what
    ranks that share a model have on its way inside blocks."""
    start_bytes = max(activations.at_backward_start, activations.within_blocks() + exchange)
    yield (
        persistent.parameters_and_optimizer
        + persistent.accumulated_gradients
        + start_bytes
        + _max_gathered_bytes(buffer_peaks)
    )
    for peak in buffer_peaks:
        gradient_bytes = max(persistent.accumulated_gradients, round(peak.backward_fraction * persistent.gradients))
        inside_bytes = activations.within_blocks(peak.backward_fraction) + exchange
        yield (
            persistent.parameters_and_optimizer
            + gradient_bytes
            + (activations.between_blocks(peak.backward_fraction) if peak.is_between_blocks else inside_bytes)
            + peak.bytes
        )
    end_gradient_bytes = max(persistent.accumulated_gradients, persistent.gradients)
    yield persistent.parameters_and_optimizer + end_gradient_bytes + activations.within_blocks(1.0) + exchange
    yield persistent.parameters_and_optimizer + end_gradient_bytes + persistent.optimizer_workspace


def pipeline_memory_peaks(
    persistent: PersistentMemory, buffer_peaks: list[CommBufferPeak], passes: PeakInFlightBytes, links: int
) -> Iterator[int]:
    """The same of a pipeline, of a rank's passes without and with gradients, and at the step's end. `links` is what is
    on its way between stages."""
    working_bytes = links + _max_gathered_bytes(buffer_peaks)
    yield persistent.parameters_and_optimizer + passes.forward_only + working_bytes
    yield persistent.parameters_and_optimizer + persistent.pipeline_gradients + passes.with_gradients + working_bytes
    for peak in buffer_peaks:
        yield persistent.parameters_and_optimizer + persistent.pipeline_gradients + peak.bytes
    yield persistent.parameters_and_optimizer + persistent.gradients + persistent.optimizer_workspace


def without_other_streams(
    persistent: PersistentMemory, buffer_peaks: list[CommBufferPeak]
) -> tuple[PersistentMemory, list[CommBufferPeak]]:
    """Return what of both is on the stream that computes: on CUDA FSDP2 gathers, and sums gradients, on others."""
    computing = [replace(peak, bytes=peak.bytes - peak.gather_stream_bytes) for peak in buffer_peaks]
    return replace(persistent, gradients=0, accumulated_gradients=0), computing


def optimizer_step_bytes(run: RunSpec, rank: RankTensors, strategy: Strategy) -> int:
    """What an optimizer needs while it steps: SGD with decay a copy of the gradients; Muon of the largest group of
    matrices of one shape the momenta that it makes, and about five copies in what it computes in (`train.optim.muon`);
    on a CPU two of the group, and five of one matrix in fp32. Fused AdamW needs nothing."""
    if strategy == "parameter_server" or run.optimizer.name == "adamw":
        return 0
    state_bytes = STATE_BYTES[run.training.precision]
    owned_elements = dict[str, int]()
    for shapes, shards in ((rank.dense, rank.shards), (rank.expert, rank.expert_shards)):
        ranks = 1 if strategy == "ddp" else shards
        owned_elements |= {name: max_shard_elements(shape, ranks) for name, shape in shapes.items()}
    if run.optimizer.name == "sgd":
        return state_bytes * sum(owned_elements.values()) if run.optimizer.weight_decay else 0
    groups = Counter[Shape]()
    for name, shape in {**rank.dense, **rank.expert}.items():
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


def _max_gathered_bytes(buffer_peaks: list[CommBufferPeak]) -> int:
    return max((peak.bytes for peak in buffer_peaks if peak.backward_fraction == 0), default=0)
