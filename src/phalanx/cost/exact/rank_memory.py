"""Memory of a run: all that each rank allocates under its layout.

Exact, and tested against the strategies to the byte: parameters, gradients and optimizer state of the fullest rank,
split by rows with the remainder. Not counted are buffers, and AdamW's step, which has 4 bytes per tensor. Estimates:
activations (`cost.exact.activation_memory`), in a pipeline of all micro-batches in flight, and communication buffers
(`comm_buffers`). Each part is its own maximum over time. The maxima occur at different times, and the total is the
maximum of the sum.

Not in the total: a gradient that is being accumulated, libraries, the process. On a GPU, `unused` is the allocator's
reserve beyond the total, and `nccl` is NCCL's buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from phalanx.cost.exact.activation_memory import (
    ActivationBytes,
    PeakInFlightBytes,
    StageBlocks,
    activation_bytes,
    peak_in_flight_bytes,
    pipeline_stages,
)
from phalanx.cost.exact.comm_buffers import (
    activation_exchange_bytes,
    comm_buffer_peaks,
    parameter_server_buffers,
    pipeline_buffer_bytes,
)
from phalanx.cost.exact.cuda_process import gap_bytes, nccl_bytes
from phalanx.cost.exact.fsdp_buffers import CommBufferPeak, fsdp_stream_buffers
from phalanx.cost.exact.layout_checks import check_layout
from phalanx.cost.exact.memory_peaks import (
    PersistentMemory,
    memory_peaks,
    optimizer_step_bytes,
    pipeline_memory_peaks,
    without_other_streams,
)
from phalanx.cost.exact.model_state import StateBytes, sharded_state_bytes
from phalanx.cost.exact.parameter_shapes import num_elements, parameter_shapes
from phalanx.cost.exact.pipeline_split import layers_per_stage
from phalanx.cost.exact.rank_state import (
    checkpoint_copy_bytes,
    effective_strategy,
    owned_counts,
    rank_model_state,
    resident_and_offloaded,
)
from phalanx.cost.exact.rank_tensors import RankTensors, rank_tensors
from phalanx.cost.formulas.collectives import Strategy
from phalanx.cost.precision import COMPUTE_BYTES, STATE_BYTES
from phalanx.schedule.registry import layout_schedule
from phalanx.spec.batch import BatchPlan, plan_batch
from phalanx.spec.layout import SHARDED_STRATEGIES, assign_parameters_to_servers
from phalanx.spec.parallel_dims import parallel_dims
from phalanx.spec.run import RunSpec


@dataclass(frozen=True)
class RankMemory:
    """Bytes that a rank allocates, by part; each part is its maximum over time."""

    parameters: int
    gradients: int
    optimizer: int
    """Optimizer state, plus the trained fp32 rows with bf16 under zero1 and zero2."""
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

    @property
    def state(self) -> int:
        """Bytes that remain from step to step."""
        return self.parameters + self.gradients + self.optimizer

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
        """Bytes in CPU memory: offloaded state and the copy for checkpoints."""
        return self.offloaded - self.on_disk + self.checkpoint_copy


def rank_memory(run: RunSpec, world_size: int) -> dict[str, RankMemory]:
    """Return the memory of the fullest rank by role.

    The role is "rank"; with a parameter server "server" and "worker"; in a pipeline "pp0", "pp1", ... by pipeline rank.

    Raises:
        UserError: If `world_size` ranks cannot run the layout.
    """
    check_layout(run, world_size)
    stage_memories = _stage_memories(run, world_size)
    if run.layout.data_parallel == "parameter_server":
        return {"server": _largest_server(run, world_size), "worker": stage_memories[0]}
    if run.layout.pp == 1:
        return {"rank": stage_memories[0]}
    return {f"pp{pp_rank}": memory for pp_rank, memory in enumerate(stage_memories)}


def worker_memories(run: RunSpec, world_size: int) -> list[RankMemory]:
    """Return the memory of each role except servers, whose parameters are in CPU memory.

    Raises:
        UserError: If `world_size` ranks cannot run the layout.
    """
    return [memory for role, memory in rank_memory(run, world_size).items() if role != "server"]


def rank_model_states(run: RunSpec, world_size: int) -> list[StateBytes]:
    """Return the model state of the fullest worker per pipeline rank, before offload.

    The state is exact, and is what remains from step to step. Without a pipeline the list has one entry.
    """
    micro_batches = plan_batch(run, world_size).gradient_accumulation_steps
    return [rank_model_state(run, rank, micro_batches) for rank in rank_tensors(run, world_size)]


def _stage_memories(run: RunSpec, world_size: int) -> list[RankMemory]:
    """Return the memory of a worker per pipeline rank."""
    layout = run.layout
    dims = parallel_dims(run.layout, world_size)
    data_dims = dims.with_cp_as_data_parallel(sharded=layout.data_parallel in SHARDED_STRATEGIES)
    batch_plan = plan_batch(run, world_size)
    strategy = effective_strategy(layout, data_dims.dp_shard)
    in_flight_peaks = _in_flight_peaks(run, batch_plan, strategy) if layout.pp > 1 else []
    exchange = activation_exchange_bytes(run, batch_plan.micro_batch_size)
    cache: dict[object, tuple[tuple[StateBytes, int, int], list[CommBufferPeak]]] = {}
    memories = []
    for pp_rank, rank in enumerate(rank_tensors(run, world_size)):
        signature = rank.signature
        if signature not in cache:
            cache[signature] = (
                resident_and_offloaded(run, rank, strategy, micro_batches=batch_plan.gradient_accumulation_steps),
                comm_buffer_peaks(
                    rank, run, strategy, dims=data_dims, accumulation=batch_plan.gradient_accumulation_steps
                ),
            )
        (state, offloaded, on_disk), buffer_peaks = cache[signature]
        persistent = _split_persistent_memory(
            run,
            rank,
            strategy,
            state=state,
            accumulation=batch_plan.gradient_accumulation_steps,
            has_no_replicas=data_dims.dp_size == 1,
        )
        if layout.pp == 1:
            activations = _stage_activations(run, batch_plan, strategy)
            comm_bytes = exchange
            activation_peak = activations.peak
            peaks = partial(memory_peaks, activations=activations, exchange=exchange)
        else:  # activations in flight include the communication inside blocks
            comm_bytes = pipeline_buffer_bytes(run, batch_plan.micro_batch_size, pp_rank)
            activation_peak = max(in_flight_peaks[pp_rank].forward_only, in_flight_peaks[pp_rank].with_gradients)
            peaks = partial(pipeline_memory_peaks, passes=in_flight_peaks[pp_rank], links=comm_bytes)
        memory = RankMemory(
            state.parameters,
            state.gradients,
            state.optimizer,
            activations=activation_peak,
            communication=comm_bytes + max((peak.bytes for peak in buffer_peaks), default=0),
            offloaded=offloaded,
            on_disk=on_disk,
        )
        peak_bytes = max(peaks(persistent, buffer_peaks))
        memory = replace(memory, non_concurrent_bytes=memory.total - peak_bytes)
        if run.cluster.uses_cuda:
            reserved = peak_bytes
            largest_sum = 0
            if strategy in ("zero3", "hsdp"):
                buffers = fsdp_stream_buffers(rank, run, batch_plan.gradient_accumulation_steps)
                reserved = max(peaks(*without_other_streams(persistent, buffer_peaks))) + buffers.side_streams
                largest_sum = buffers.largest_sum
            elif strategy == "ddp" and data_dims.dp_size > 1 and layout.pp == 1:
                reserved += state.gradients  # DDP rebuilds its buckets in the second step, next to the first ones
            reserved += gap_bytes(run, batch_plan.micro_batch_size, rank, largest_sum=largest_sum)
            memory = replace(
                memory,
                unused=max(0, reserved - peak_bytes),
                nccl=nccl_bytes(run, world_size),
                checkpoint_copy=checkpoint_copy_bytes(run, rank, strategy),
            )
        memories.append(memory)
    return memories


def _split_persistent_memory(
    run: RunSpec, rank: RankTensors, strategy: Strategy, state: StateBytes, accumulation: int, has_no_replicas: bool
) -> PersistentMemory:
    """Split a rank's state by the time at which it exists.

    DDP's buckets exist all the time, and a parameter server's worker accumulates in place. Other strategies free
    gradients after use. If a step leaves parts unused, DDP frees their gradients, and all micro-batches before the last
    allocate them outside the buckets. In a pipeline, ZeRO-3 accumulates full gradients.
    """
    layout = run.layout
    gradients = state.gradients
    has_buckets = strategy == "ddp" and not has_no_replicas and layout.pp == 1
    num_gradient_sets = max(has_buckets, accumulation > 1) + (
        has_buckets and layout.ddp_find_unused_parameters and accumulation > 1
    )
    summed_bytes = gradients
    if strategy in ("zero3", "hsdp") and layout.pp > 1:
        summed_bytes = STATE_BYTES[run.training.precision] * sum(
            map(num_elements, [*rank.dense.values(), *rank.expert.values()])
        )
    if rank.tied_embedding_copy is not None:  # its gradient, until it is sent to the rank that trains it
        summed_bytes += COMPUTE_BYTES[run.training.precision] * num_elements(rank.tied_embedding_copy)
    before_bytes = gradients if strategy == "parameter_server" else num_gradient_sets * gradients
    return PersistentMemory(
        state.parameters + state.optimizer,
        gradients,
        before_bytes,
        pipeline_gradients=summed_bytes,
        optimizer_workspace=optimizer_step_bytes(run, rank, strategy),
    )


def disk_offload_bytes(run: RunSpec, world_size: int) -> int:
    """Return the bytes that the fullest rank stores in files (`layout.offload = "nvme"`)."""
    layout = run.layout
    dims = parallel_dims(run.layout, world_size)
    strategy = effective_strategy(
        layout, dims.with_cp_as_data_parallel(sharded=layout.data_parallel in SHARDED_STRATEGIES).dp_shard
    )
    micro_batches = plan_batch(run, world_size).gradient_accumulation_steps
    return max(
        resident_and_offloaded(run, rank, strategy, micro_batches=micro_batches)[2]
        for rank in rank_tensors(run, world_size)
    )


def _stage_activations(
    run: RunSpec, batch_plan: BatchPlan, strategy: Strategy, stage: StageBlocks | None = None
) -> ActivationBytes:
    """Return the activations of a micro-batch, in a pipeline those of one stage."""
    autocast = strategy in ("ddp", "parameter_server")
    arguments = (
        run.model,
        batch_plan.micro_batch_size,
        run.training.seq_len,
        run.training.precision,
        run.layout,
        autocast,
    )
    return activation_bytes(*arguments, run.data.mask_documents, stage, run.cluster.uses_cuda)


def _in_flight_peaks(run: RunSpec, batch_plan: BatchPlan, strategy: Strategy) -> list[PeakInFlightBytes]:
    """Return the peak activations per pipeline rank."""
    schedule = layout_schedule(run.layout, batch_plan.gradient_accumulation_steps)
    cache = dict[object, ActivationBytes]()
    stage_activations = []
    for stage in pipeline_stages(layers_per_stage(run), schedule):
        signature = tuple(map(run.model.is_moe_layer, stage.layers)), stage.first, stage.last
        if signature not in cache:
            cache[signature] = _stage_activations(run, batch_plan, strategy, stage=stage)
        stage_activations.append(cache[signature])
    exchange = activation_exchange_bytes(run, batch_plan.micro_batch_size)
    return [
        peak_in_flight_bytes(schedule, pp_rank, stage_activations, inside=exchange) for pp_rank in range(run.layout.pp)
    ]


def _largest_server(run: RunSpec, world_size: int) -> RankMemory:
    """Return the memory of the fullest server, which is CPU memory on any hardware."""
    layout = run.layout
    shapes = parameter_shapes(run.model)
    workers = plan_batch(run, world_size).dp_size
    owner = assign_parameters_to_servers(
        {name: num_elements(shape) for name, shape in shapes.items()}, layout.num_servers
    )
    servers = []
    for server in range(layout.num_servers):
        owned, states = owned_counts({name: shape for name, shape in shapes.items() if owner[name] == server}, run, 1)
        state = sharded_state_bytes("parameter_server", run.training.precision, owned, owned=owned, states=states)
        buffers = parameter_server_buffers(state.parameters, workers, layout.max_staleness)
        servers.append(RankMemory(state.parameters, state.gradients, state.optimizer, communication=buffers))
    return max(servers, key=lambda server: server.total)
