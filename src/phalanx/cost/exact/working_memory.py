"""Memory of a rank within a step: its activations, and its communication inside and between blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from phalanx.cost.exact.activation_bytes import ActivationBytes
from phalanx.cost.exact.activation_memory import StageBlocks, activation_bytes, pipeline_stages
from phalanx.cost.exact.comm_buffer_peak import CommBufferPeak
from phalanx.cost.exact.comm_buffers import cuda_exchange_bytes, pipeline_buffer_bytes
from phalanx.cost.exact.forward_shape import forward_shape
from phalanx.cost.exact.in_flight_memory import GradientSums, PeakInFlightBytes, peak_in_flight_bytes
from phalanx.cost.exact.memory_peaks import PersistentMemory, memory_peaks, pipeline_memory_peaks, weight_gradients
from phalanx.cost.exact.model_state import zero_gradient_bytes
from phalanx.cost.precision import COMPUTE_BYTES
from phalanx.program.pipeline_split import layers_per_stage
from phalanx.program.rank_tensors import RankTensors
from phalanx.schedule.registry import layout_schedule
from phalanx.schedule.schedule import Schedule
from phalanx.spec.layout import EMBEDDINGS, ZERO_STRATEGIES
from phalanx.spec.model import ModelSpec
from phalanx.spec.parameter_shapes import num_elements
from phalanx.spec.parts.block import blocks
from phalanx.spec.resolved_run import ResolvedRun


@dataclass(frozen=True)
class WorkingMemory:
    """Activations of a rank, and its communication inside and between blocks."""

    activations: int
    exchanged: int
    """Bytes of model-parallel communication inside blocks; in a pipeline, those of messages between stages."""
    offloaded: int
    """Bytes of activations in CPU memory."""
    peaks: Callable[[PersistentMemory, list[CommBufferPeak]], Iterator[int]]
    """Yields the bytes at the times at which memory can peak."""


def working_memories(resolved: ResolvedRun, ranks: Sequence[RankTensors]) -> list[WorkingMemory]:
    """Return the working memory of a worker per pipeline rank.

    Without a pipeline, one micro-batch at a time exchanges tensors inside blocks. In a pipeline, several micro-batches
    are in flight, whose bytes include these exchanges, and stages send messages.
    """
    if resolved.layout.pp == 1:
        activations = activation_bytes(resolved.run.model, forward_shape(resolved))
        cuda_exchange = cuda_exchange_bytes(resolved)
        return [
            WorkingMemory(
                activations=activations.peak,
                exchanged=max(cuda_exchange, activations.exchanged),
                offloaded=activations.offloaded,
                peaks=partial(memory_peaks, activations=activations, cuda_exchange=cuda_exchange),
            )
        ]
    memories = []
    schedule = layout_schedule(resolved.layout, resolved.micro_batches)
    for pp_rank, passes in enumerate(_in_flight_peaks(resolved, schedule, ranks)):
        messages = pipeline_buffer_bytes(resolved, schedule, pp_rank)
        memories.append(
            WorkingMemory(
                activations=passes.activations,
                exchanged=messages,
                offloaded=passes.offloaded,
                peaks=partial(pipeline_memory_peaks, passes=passes, links=messages),
            )
        )
    return memories


def _in_flight_peaks(
    resolved: ResolvedRun, schedule: Schedule, ranks: Sequence[RankTensors]
) -> list[PeakInFlightBytes]:
    """Return the peak activations per pipeline rank, with the bytes that are exchanged inside blocks."""
    run = resolved.run
    stages = pipeline_stages(layers_per_stage(run), schedule, run.layout)
    # Stages repeat: those with blocks of the same kinds, between the first and the last, save equal activations if they
    # recompute equally many blocks.
    layers = blocks(run.model, run.layout)
    signatures = [
        (tuple(layers[layer] for layer in stage.layers), stage.first, stage.last, stage.recomputed) for stage in stages
    ]
    shape = forward_shape(resolved)
    activations_by_signature = dict[object, ActivationBytes]()
    for signature, stage in zip(signatures, stages, strict=True):
        if signature not in activations_by_signature:
            activations_by_signature[signature] = activation_bytes(run.model, shape, stage)
    stage_activations = [activations_by_signature[signature] for signature in signatures]
    cuda_exchange = cuda_exchange_bytes(resolved)
    return [
        peak_in_flight_bytes(
            schedule,
            pp_rank,
            stage_activations,
            cuda_exchange=cuda_exchange,
            sums=_gradient_sums(
                resolved,
                _gradient_shares(run.model, rank, {index: stages[index] for index in schedule.stages_of(pp_rank)}),
            ),
        )
        for pp_rank, rank in enumerate(ranks)
    ]


def _gradient_shares(spec: ModelSpec, rank: RankTensors, stages: Mapping[int, StageBlocks]) -> dict[int, float]:
    """Return the fraction of a rank's parameters that each of its stages has.

    An embedding that the last stage uses too has its first gradient there."""
    embeds_last = spec.reuses_embedding and any(stage.last for stage in stages.values())
    counts = {
        index: sum(
            num_elements(shape)
            for name, shape in rank.trained.items()
            if _is_in_stage(name, stage, stage.last if embeds_last else stage.first)
        )
        for index, stage in stages.items()
    }
    return {index: count / max(1, sum(counts.values())) for index, count in counts.items()}


def _gradient_sums(resolved: ResolvedRun, shares: Mapping[int, float]) -> GradientSums:
    """Return how the sums of gradients of a pipeline rank grow: by stage, and in ZeRO from bf16 to fp32."""
    precision = resolved.run.training.precision
    final_bytes = zero_gradient_bytes(precision, resolved.micro_batches)
    return GradientSums(
        shares=shares,
        narrow=COMPUTE_BYTES[precision] / final_bytes if resolved.strategy in ZERO_STRATEGIES else 1.0,
        weight_gradients=weight_gradients(resolved),
    )


def _is_in_stage(name: str, stage: StageBlocks, embeds: bool) -> bool:
    """Return whether a stage, which may embed tokens, has the parameter of this name."""
    if name.startswith("blocks."):
        return int(name.split(".")[1]) in stage.layers
    return embeds if name.startswith(EMBEDDINGS) else stage.last
