"""Memory of a rank within a step: its activations, and its communication inside and between blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from phalanx.cost.exact.activation_memory import (
    ActivationBytes,
    PeakInFlightBytes,
    StageBlocks,
    activation_bytes,
    peak_in_flight_bytes,
    pipeline_stages,
)
from phalanx.cost.exact.comm_buffers import activation_exchange_bytes, pipeline_buffer_bytes
from phalanx.cost.exact.fsdp_buffers import CommBufferPeak
from phalanx.cost.exact.memory_peaks import PersistentMemory, memory_peaks, pipeline_memory_peaks
from phalanx.cost.exact.pipeline_split import layers_per_stage
from phalanx.cost.formulas.collectives import Strategy
from phalanx.schedule.registry import layout_schedule
from phalanx.spec.batch import BatchPlan
from phalanx.spec.run import RunSpec


@dataclass(frozen=True)
class WorkingMemory:
    """Activations of a rank, and its communication inside and between blocks."""

    activations: int
    exchanged: int
    """Bytes of model-parallel communication inside blocks; in a pipeline, those of messages between stages."""
    peaks: Callable[[PersistentMemory, list[CommBufferPeak]], Iterator[int]]
    """Yields the bytes at the times at which memory can peak."""


def working_memories(run: RunSpec, batch_plan: BatchPlan, strategy: Strategy) -> list[WorkingMemory]:
    """Return the working memory of a worker per pipeline rank.

    Args:
        run: The run.
        batch_plan: Sizes of the run's batches.
        strategy: Effective strategy of the layout.
    """
    batch = batch_plan.micro_batch_size
    exchange = activation_exchange_bytes(run, batch)
    if run.layout.pp == 1:
        activations = _stage_activations(run, batch, strategy)
        peaks = partial(memory_peaks, activations=activations, exchange=exchange)
        return [WorkingMemory(activations.peak, exchange, peaks)]
    memories = []
    passes_by_rank = _in_flight_peaks(run, batch_plan, strategy, exchange=exchange)
    for pp_rank, passes in enumerate(passes_by_rank):  # these include the communication inside blocks
        messages = pipeline_buffer_bytes(run, batch, pp_rank)
        peaks = partial(pipeline_memory_peaks, passes=passes, links=messages)
        memories.append(WorkingMemory(max(passes.forward_only, passes.with_gradients), messages, peaks))
    return memories


def _stage_activations(
    run: RunSpec, batch: int, strategy: Strategy, stage: StageBlocks | None = None
) -> ActivationBytes:
    """Return the activations of a micro-batch, in a pipeline those of one stage."""
    return activation_bytes(
        run.model,
        batch,
        run.training.seq_len,
        precision=run.training.precision,
        layout=run.layout,
        autocast=strategy in ("ddp", "parameter_server"),
        masked=run.data.mask_documents,
        stage=stage,
        on_cuda=run.cluster.uses_cuda,
    )


def _in_flight_peaks(run: RunSpec, batch_plan: BatchPlan, strategy: Strategy, exchange: int) -> list[PeakInFlightBytes]:
    """Return the peak activations per pipeline rank, with the bytes that are exchanged inside blocks."""
    schedule = layout_schedule(run.layout, batch_plan.gradient_accumulation_steps)
    cache = dict[object, ActivationBytes]()
    stage_activations = []
    for stage in pipeline_stages(layers_per_stage(run), schedule):
        signature = tuple(map(run.model.is_moe_layer, stage.layers)), stage.first, stage.last
        if signature not in cache:
            cache[signature] = _stage_activations(run, batch_plan.micro_batch_size, strategy, stage=stage)
        stage_activations.append(cache[signature])
    return [
        peak_in_flight_bytes(schedule, pp_rank, stage_activations, inside=exchange) for pp_rank in range(run.layout.pp)
    ]
