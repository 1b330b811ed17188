"""Memory of the teacher of a run with distillation, by pipeline rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.cost.exact.activation_memory import activation_bytes
from phalanx.cost.exact.comm_buffers import cuda_exchange_bytes
from phalanx.cost.exact.forward_shape import forward_shape
from phalanx.cost.exact.rank_state import rank_model_state
from phalanx.program.fsdp_units import HEAD, ROOT, FsdpUnit, fsdp_units
from phalanx.program.rank_tensors import rank_tensors
from phalanx.schedule.registry import representative_schedule
from phalanx.spec.files.teacher import resolved_teacher
from phalanx.spec.layout import FSDP_STRATEGIES, Layout
from phalanx.spec.resolved_run import ResolvedRun


@dataclass(frozen=True)
class TeacherMemory:
    """Bytes of the teacher on a rank."""

    weights: int
    """Its weights, to the byte."""
    kept: int
    """Inputs of its head until their losses."""
    gathered: int
    """Bytes that FSDP has gathered with the matrix of its head, until the losses."""
    passes: int
    """Peak of its forward passes beyond its weights, in which the student has no activations."""


def teacher_memories(resolved: ResolvedRun) -> list[TeacherMemory]:
    """Return the teacher's memory on the fullest rank per pipeline rank; [] without distillation."""
    teacher = resolved_teacher(resolved)
    if teacher is None:
        return []
    model = teacher.run.model
    layout = teacher.layout
    shape = forward_shape(teacher)
    activations = activation_bytes(model, shape)
    # Of all its layers, also in a pipeline, whose stages have fewer.
    pass_bytes = activations.peak + max(cuda_exchange_bytes(teacher), activations.exchanged)
    head_bytes = shape.residual_tokens * model.hidden_size * shape.compute_bytes
    head_bytes *= teacher.micro_batches if layout.pp > 1 else 1
    if shape.residual_tokens < shape.tokens:  # that of a micro-batch, gathered for its loss
        head_bytes += shape.tokens * model.hidden_size * shape.compute_bytes
    is_sharded = teacher.strategy in FSDP_STRATEGIES
    schedule = representative_schedule(layout)
    last_rank = schedule.rank_of[schedule.stages - 1] if layout.pp > 1 else 0
    memories = []
    for pp_rank, rank in enumerate(rank_tensors(teacher)):
        units = fsdp_units(rank, layout) if is_sharded else []
        kept_units = [unit for unit in units if unit.name in (HEAD, ROOT)] if pp_rank == last_rank else []
        memories.append(
            TeacherMemory(
                weights=rank_model_state(teacher, rank).total,
                kept=head_bytes if pp_rank == last_rank else 0,
                gathered=sum(unit.gathered_bytes(shape.compute_bytes) for unit in kept_units),
                passes=pass_bytes + _max_gathered(units, layout, shape.compute_bytes),
            )
        )
    return memories


def _max_gathered(units: Sequence[FsdpUnit], layout: Layout, size: int) -> int:
    """Return the bytes that FSDP has gathered at once.

    They are all in a pipeline, or those outside of blocks, and those of a unit in blocks and the ones after it."""
    in_blocks = sorted(unit.gathered_bytes(size) for unit in units if unit.is_in_blocks)
    at_once = len(in_blocks) if layout.pp > 1 else 1 + layout.fsdp_prefetch
    return sum(unit.gathered_bytes(size) for unit in units if not unit.is_in_blocks) + sum(in_blocks[-at_once:])
