"""Memory of the teacher of a run with distillation, by pipeline rank."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from phalanx.cost.exact.activation_memory import activation_bytes
from phalanx.cost.exact.comm_buffers import cuda_exchange_bytes
from phalanx.cost.exact.forward_shape import forward_shape
from phalanx.cost.exact.rank_state import rank_model_state
from phalanx.program.rank_tensors import RankTensors, rank_tensors
from phalanx.schedule.registry import representative_schedule
from phalanx.spec.files.teacher import resolved_teacher
from phalanx.spec.layout import FSDP_STRATEGIES
from phalanx.spec.parameter_shapes import num_elements
from phalanx.spec.resolved_run import ResolvedRun


@dataclass(frozen=True)
class TeacherMemory:
    """Bytes of the teacher on a rank."""

    weights: int
    """Its weights, to the byte."""
    kept: int
    """Inputs of its head until their losses."""
    gathered: int
    """Matrix of its head that FSDP gathers, until the losses."""
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
    head_bytes = shape.tokens * model.hidden_size * shape.compute_bytes
    head_bytes *= teacher.micro_batches if layout.pp > 1 else 1
    is_sharded = teacher.strategy in FSDP_STRATEGIES
    matrix_bytes = shape.max_local_count(model.vocab_size) * model.hidden_size * shape.compute_bytes
    schedule = representative_schedule(layout)
    last_rank = schedule.rank_of[schedule.stages - 1] if layout.pp > 1 else 0
    return [
        TeacherMemory(
            weights=rank_model_state(teacher, rank).total,
            kept=head_bytes if pp_rank == last_rank else 0,
            gathered=matrix_bytes if pp_rank == last_rank and is_sharded else 0,
            passes=pass_bytes + (_gathered_bytes(rank, shape.compute_bytes) if is_sharded else 0),
        )
        for pp_rank, rank in enumerate(rank_tensors(teacher))
    ]


def _gathered_bytes(rank: RankTensors, number_bytes: int) -> int:
    """Return the bytes of what FSDP has gathered at once: two blocks, and the tensors outside of blocks."""
    counts: dict[str, int] = defaultdict(int)
    for name, shape in rank.all.items():
        counts[".".join(name.split(".")[:2]) if name.startswith("blocks.") else ""] += num_elements(shape)
    outside = counts.pop("", 0)
    return number_bytes * (outside + sum(sorted(counts.values())[-2:]))
