"""Bytes of activations and their gradients that a rank sends: inside blocks, between stages, and between the ends."""

from __future__ import annotations

from dataclasses import replace

from phalanx.cost.exact.activation_memory import full_model_stage, pipeline_stages
from phalanx.cost.exact.activation_traffic import stage_activation_traffic
from phalanx.cost.exact.forward_shape import ForwardShape, forward_shape
from phalanx.cost.formulas.collectives import Traffic
from phalanx.program.pipeline_split import layers_per_stage
from phalanx.program.rank_tensors import RankTensors
from phalanx.schedule.registry import layout_schedule
from phalanx.schedule.schedule import Schedule
from phalanx.spec.parameter_shapes import num_elements
from phalanx.spec.parts.block import residual_stream
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec


def model_parallel_traffic(resolved: ResolvedRun, stage_tensors: list[RankTensors]) -> list[list[Traffic]]:
    """Return the model-parallel traffic of activations and their gradients, per pipeline rank.

    `stage_tensors` has the tensors of one rank per pipeline rank.
    """
    run = resolved.run
    micro_batches = resolved.micro_batches
    shape = forward_shape(resolved)
    if run.layout.pp == 1:
        stage = full_model_stage(run.model, run.layout)
        return [_scale_traffic(micro_batches, stage_activation_traffic(run.model, shape, stage))]
    schedule = layout_schedule(run.layout, micro_batches)
    stages = pipeline_stages(layers_per_stage(run), schedule, run.layout)
    traffic = []
    for pp_rank in range(run.layout.pp):
        local_stages = [stages[stage] for stage in schedule.stages_of(pp_rank)]
        inside = [row for stage in local_stages for row in stage_activation_traffic(run.model, shape, stage)]
        traffic.append(
            [
                *_scale_traffic(micro_batches, inside),
                _stage_messages(run, shape, schedule, pp_rank=pp_rank),
                *_shared_embedding_messages(run, shape, schedule, pp_rank=pp_rank, stage_tensors=stage_tensors),
            ]
        )
    return traffic


def _stage_messages(run: RunSpec, shape: ForwardShape, schedule: Schedule, pp_rank: int) -> Traffic:
    """Return the messages of a pipeline rank to other ranks: outputs of its stages, and gradients of their inputs."""
    num_sends = sum(schedule.messages_by_receiver(pp_rank).values())
    message_bytes = shape.value_bytes(residual_stream(run.model))
    purpose = "activations and their gradients, from stage to stage"
    return Traffic("send", num_sends * message_bytes, purpose, "pp", calls=num_sends)


def _shared_embedding_messages(
    run: RunSpec, shape: ForwardShape, schedule: Schedule, pp_rank: int, stage_tensors: list[RankTensors]
) -> list[Traffic]:
    """Return the messages between the ends of a pipeline that both have the embedding; none from other ranks."""
    first, last = schedule.end_ranks
    end_stages = {0, schedule.stages - 1}
    if not run.model.reuses_embedding or first == last or end_stages.isdisjoint(schedule.stages_of(pp_rank)):
        return []
    size = num_elements(stage_tensors[first].dense["embedding.weight"]) * shape.residual_bytes
    purpose = "the shared embedding's weights, or their gradients"
    return [Traffic("send", size, purpose, "ends")]


def _scale_traffic(count: int, traffic: list[Traffic]) -> list[Traffic]:
    return [replace(row, bytes=count * row.bytes, calls=count * row.calls) for row in traffic]
