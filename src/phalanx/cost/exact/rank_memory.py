"""Memory of a run: all that each rank allocates under its layout.

Exact, and tested against the strategies to the byte: parameters, gradients and optimizer state of the fullest rank,
split by rows with the remainder. Not counted are buffers, and AdamW's step, which has 4 bytes per tensor. Estimates:
activations (`cost.exact.activation_memory`), in a pipeline of all micro-batches in flight, and communication buffers
(`comm_buffers`). Each part is its own maximum over time. The maxima occur at different times, and the total is the
maximum of the sum.

Not in the total: a gradient that is being accumulated, libraries, the process. On a GPU, `unused` is the allocator's
reserve beyond the total, and `nccl` is NCCL's buffers.

Why: `docs/design/decisions/two-memory-counts.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.cost.exact.comm_buffer_peak import CommBufferPeak
from phalanx.cost.exact.comm_buffers import comm_buffer_peaks, parameter_server_buffers
from phalanx.cost.exact.cuda_process import gap_bytes, nccl_bytes
from phalanx.cost.exact.fsdp_cuda_buffers import fsdp_stream_buffers
from phalanx.cost.exact.layout_checks import check_layout
from phalanx.cost.exact.memory_peaks import PersistentMemory, split_persistent_memory, without_other_streams
from phalanx.cost.exact.model_state import StateBytes, sharded_state_bytes
from phalanx.cost.exact.rank_state import (
    carried_bytes,
    checkpoint_copy_bytes,
    owned_counts,
    rank_model_state,
    resident_and_offloaded,
)
from phalanx.cost.exact.teacher_memory import TeacherMemory, teacher_memories
from phalanx.cost.exact.working_memory import WorkingMemory, working_memories
from phalanx.program.rank_tensors import RankTensors, rank_tensors
from phalanx.spec.layout import FSDP_STRATEGIES, assign_parameters_to_servers
from phalanx.spec.parameter_shapes import num_elements, trained_shapes
from phalanx.spec.resolved_run import ResolvedRun


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes that a rank allocates, by part; each part is its maximum over time."""

    parameters: int
    gradients: int
    optimizer: int
    """Optimizer state, plus the trained fp32 rows with bf16 under zero1 and zero2."""
    teacher: int = 0
    """Weights of the teacher of a run with distillation."""
    activations: int = 0
    communication: int = 0
    """Buffers, including gathered parameters that are freed again."""
    offloaded: int = 0
    """State in CPU memory or files; not part of `total`."""
    on_disk: int = 0
    """Part of `offloaded` that is in files."""
    unused: int = 0
    """Bytes that CUDA's allocator reserves beyond `total`: one stream cannot reuse memory of another."""
    nccl: int = 0
    """Bytes of NCCL's communicators on a GPU."""
    non_concurrent_bytes: int = 0
    """Sum of the maxima of all parts, minus the maximum of their sum.

    It is negative if memory peaks at the update, because the optimizer's workspace belongs to no part.
    """
    checkpoint_copy: int = 0
    """CPU memory of a rank on a GPU: the copy of its state from which checkpoints are written."""
    offloaded_activations: int = 0
    """CPU memory of a rank on a GPU: inputs of recomputed blocks (`layout.activation_checkpointing = "offload"`)."""

    @property
    def state(self) -> int:
        """Bytes that remain from step to step."""
        return self.parameters + self.gradients + self.optimizer + self.teacher

    @property
    def working(self) -> int:
        """Bytes that are allocated and freed within a step."""
        return self.activations + self.communication

    @property
    def total(self) -> int:
        """Peak bytes on the device."""
        return self.state + self.working - self.non_concurrent_bytes

    @property
    def reserved(self) -> int:
        """Bytes that the allocator reserves on the device."""
        return self.total + self.unused

    @property
    def device(self) -> int:
        """Bytes of the device that the rank uses, without the driver's context."""
        return self.reserved + self.nccl

    @property
    def host(self) -> int:
        """Bytes in CPU memory: offloaded state and activations, and the copy for checkpoints."""
        return self.offloaded - self.on_disk + self.checkpoint_copy + self.offloaded_activations


def rank_memory(resolved: ResolvedRun) -> dict[str, RankMemory]:
    """Return the memory of the fullest rank by role.

    The role is "rank"; with a parameter server "server" and "worker"; in a pipeline "pp0", "pp1", ... by pipeline rank.
    Raises UserError if the ranks cannot run the layout.
    """
    check_layout(resolved)
    ranks = rank_tensors(resolved)
    stages = zip(ranks, _stage_states(resolved, ranks), working_memories(resolved, ranks), strict=True)
    stage_memories = [_stage_memory(resolved, rank, state, working) for rank, state, working in stages]
    if teachers := teacher_memories(resolved):
        stage_memories = [_with_teacher(*each) for each in zip(stage_memories, teachers, strict=True)]
    if resolved.layout.data_parallel == "parameter_server":
        return {"server": _largest_server(resolved), "worker": stage_memories[0]}
    if resolved.layout.pp == 1:
        return {"rank": stage_memories[0]}
    return {f"pp{pp_rank}": memory for pp_rank, memory in enumerate(stage_memories)}


def _with_teacher(memory: RankMemory, teacher: TeacherMemory) -> RankMemory:
    """Return the memory of a rank that also has a teacher.

    Its forward passes run while the student has no activations."""
    peak = teacher.weights + max(memory.total + teacher.kept + teacher.gathered, memory.state + teacher.passes)
    memory = replace(
        memory,
        teacher=teacher.weights,
        activations=memory.activations + teacher.kept,
        communication=memory.communication + teacher.gathered,
    )
    return replace(memory, non_concurrent_bytes=memory.state + memory.working - peak)


def worker_memories(resolved: ResolvedRun) -> list[RankMemory]:
    """Return the memory of each role except servers, whose parameters are in CPU memory.

    Raises UserError if the ranks cannot run the layout.
    """
    return [memory for role, memory in rank_memory(resolved).items() if role != "server"]


def rank_model_states(resolved: ResolvedRun) -> list[StateBytes]:
    """Return the model state of the fullest worker per pipeline rank, before offload.

    The state is exact, and is what remains from step to step. Without a pipeline the list has one entry.
    """
    return [rank_model_state(resolved, rank) for rank in rank_tensors(resolved)]


@dataclass(frozen=True)
class _StageState:
    """State of a rank from step to step, and its communication buffers."""

    resident: StateBytes
    offloaded: int
    on_disk: int
    buffer_peaks: list[CommBufferPeak]


def _stage_states(resolved: ResolvedRun, ranks: Sequence[RankTensors]) -> list[_StageState]:
    """Return the state of each pipeline rank.

    Stages repeat: between the first and the last, ranks have tensors of equal shapes in other blocks. Each distinct
    state is counted once, because a search counts the memory of hundreds of layouts.
    """
    signatures = [rank.signature for rank in ranks]
    state_by_signature: dict[object, _StageState] = {}
    for signature, rank in zip(signatures, ranks, strict=True):
        if signature not in state_by_signature:
            resident, offloaded, on_disk = resident_and_offloaded(resolved, rank)
            buffer_peaks = comm_buffer_peaks(resolved, rank)
            state_by_signature[signature] = _StageState(resident, offloaded, on_disk, buffer_peaks)
    return [state_by_signature[signature] for signature in signatures]


def _stage_memory(resolved: ResolvedRun, rank: RankTensors, state: _StageState, working: WorkingMemory) -> RankMemory:
    """Return the memory of a rank from its state, its activations and its communication."""
    persistent = split_persistent_memory(resolved, rank, state.resident)
    peak_bytes = max(working.peaks(persistent, state.buffer_peaks))
    memory = RankMemory(
        parameters=state.resident.parameters,
        gradients=state.resident.gradients,
        optimizer=state.resident.optimizer,
        activations=working.activations,
        communication=working.exchanged + max((peak.bytes for peak in state.buffer_peaks), default=0),
        offloaded=state.offloaded,
        on_disk=state.on_disk,
        offloaded_activations=working.offloaded,
    )
    memory = replace(memory, non_concurrent_bytes=memory.total - peak_bytes)
    if not resolved.run.cluster.uses_cuda:
        return memory
    return replace(
        memory,
        unused=max(0, _reserved_bytes(resolved, rank, state, persistent, working, peak_bytes) - peak_bytes),
        nccl=nccl_bytes(resolved),
        checkpoint_copy=checkpoint_copy_bytes(resolved, rank),
    )


def _reserved_bytes(
    resolved: ResolvedRun,
    rank: RankTensors,
    state: _StageState,
    persistent: PersistentMemory,
    working: WorkingMemory,
    peak_bytes: int,
) -> int:
    """Return the bytes that CUDA's allocator reserves: memory of one stream cannot be reused by another."""
    largest_sum = 0
    if resolved.strategy in FSDP_STRATEGIES:
        buffers = fsdp_stream_buffers(resolved, rank)
        computing_peaks = working.peaks(*without_other_streams(persistent, state.buffer_peaks))
        peak_bytes = max(computing_peaks) + buffers.side_streams
        largest_sum = buffers.largest_sum
    elif resolved.strategy == "ddp" and resolved.data_dims.dp_size > 1 and resolved.layout.pp == 1:
        peak_bytes += state.resident.gradients  # DDP rebuilds its buckets in the second step, next to the first ones
    return peak_bytes + gap_bytes(resolved, rank, largest_sum)


def disk_offload_bytes(resolved: ResolvedRun) -> int:
    """Return the bytes that the fullest rank stores in files (`layout.offload = "nvme"`)."""
    return max(resident_and_offloaded(resolved, rank)[2] for rank in rank_tensors(resolved))


def _largest_server(resolved: ResolvedRun) -> RankMemory:
    """Return the memory of the fullest server, which is CPU memory on any hardware."""
    run = resolved.run
    layout = run.layout
    shapes = trained_shapes(run.model)
    workers = resolved.batch.dp_size
    owner = assign_parameters_to_servers(
        {name: num_elements(shape) for name, shape in shapes.items()}, layout.num_servers
    )
    carried = carried_bytes(run, rank_tensors(resolved)[0])
    servers = []
    for server in range(layout.num_servers):
        owned, states = owned_counts({name: shape for name, shape in shapes.items() if owner[name] == server}, run, 1)
        state = sharded_state_bytes("parameter_server", run.training.precision, owned, owned=owned, states=states)
        buffers = parameter_server_buffers(state.parameters, workers, layout.max_staleness)
        servers.append(
            RankMemory(
                parameters=state.parameters + carried,
                gradients=state.gradients,
                optimizer=state.optimizer,
                communication=buffers,
            )
        )
    return max(servers, key=lambda server: server.total)
