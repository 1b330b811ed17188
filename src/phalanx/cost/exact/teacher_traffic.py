"""Traffic of the teacher of a run with distillation: forward passes without gradients, up to the input of its head."""

from __future__ import annotations

from dataclasses import replace

from phalanx.cost.exact.activation_memory import StageBlocks, pipeline_stages
from phalanx.cost.exact.activation_traffic import stage_inference_traffic
from phalanx.cost.exact.forward_shape import ForwardShape, forward_shape
from phalanx.cost.formulas.collectives import Traffic, sent_bytes
from phalanx.program.fsdp_units import HEAD, ROOT, fsdp_units
from phalanx.program.pipeline_split import layers_per_stage
from phalanx.program.rank_tensors import RankTensors, rank_tensors
from phalanx.schedule.registry import representative_schedule
from phalanx.spec.files.teacher import resolved_teacher
from phalanx.spec.layout import FSDP_STRATEGIES
from phalanx.spec.parts.block import residual_stream
from phalanx.spec.resolved_run import ResolvedRun


def teacher_traffic(resolved: ResolvedRun, tp_rank: int = 0) -> list[list[Traffic]]:
    """Return the teacher's traffic in one update per pipeline rank; [] without distillation."""
    teacher = resolved_teacher(resolved)
    if teacher is None:
        return []
    traffic = _passes_by_rank(teacher)
    if teacher.strategy in FSDP_STRATEGIES:
        gathers = [_gathers(teacher, rank) for rank in rank_tensors(teacher, tp_rank)]
        traffic = [[*gathered, *passes] for gathered, passes in zip(gathers, traffic, strict=True)]
    return [[replace(row, purpose=f"teacher: {row.purpose}") for row in rows if row.bytes] for rows in traffic]


def _passes_by_rank(teacher: ResolvedRun) -> list[list[Traffic]]:
    """Return the traffic of activations in the passes of all micro-batches."""
    model = teacher.run.model
    layout = teacher.layout
    shape = forward_shape(teacher)
    if layout.pp == 1:
        stage = StageBlocks(layers=range(model.num_layers), first=True, last=True)
        passes = [stage_inference_traffic(model, shape, stage)]
    else:
        schedule = representative_schedule(layout)
        stages = pipeline_stages(layers_per_stage(teacher.run), schedule, layout)
        passes = []
        for pp_rank in range(layout.pp):
            local_stages = schedule.stages_of(pp_rank)
            receivers = [schedule.rank_of[stage + 1] for stage in local_stages if stage + 1 < schedule.stages]
            inside = [row for index in local_stages for row in stage_inference_traffic(model, shape, stages[index])]
            num_sends = sum(receiver != pp_rank for receiver in receivers)
            passes.append([*inside, *num_sends * [_message(teacher, shape)]])
    count = teacher.micro_batches
    return [[replace(row, bytes=count * row.bytes, calls=count * row.calls) for row in rows] for rows in passes]


def _message(teacher: ResolvedRun, shape: ForwardShape) -> Traffic:
    """Return the message of a stage's output to the next one."""
    size = shape.value_bytes(residual_stream(teacher.run.model))
    return Traffic("send", size, "activations, from stage to stage", "pp")


def _gathers(teacher: ResolvedRun, rank: RankTensors) -> list[Traffic]:
    """Return the gathers of FSDP in an update.

    What the losses need stays gathered from the first micro-batch on, and in a pipeline everything until all of the
    teacher's passes have run."""
    shape = forward_shape(teacher)
    rows = []
    for unit in fsdp_units(rank, teacher.layout):
        if unit.is_in_blocks and int(unit.name.split(".")[1]) >= teacher.run.model.num_layers:
            continue  # a layer for multi-token prediction
        calls = 1 if teacher.layout.pp > 1 or unit.name in (HEAD, ROOT) else teacher.micro_batches
        size = calls * sent_bytes("all_gather", unit.gathered_bytes(shape.compute_bytes), unit.ranks)
        rows.append(Traffic("all_gather", size, "parameters, for the forward pass", calls=calls))
    return rows
