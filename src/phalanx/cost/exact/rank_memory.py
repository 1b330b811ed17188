"""What a run takes in memory: state of a whole model, and all that each rank holds under its layout.

Exact, tested against the strategies to the byte: parameters, gradients and optimizer state of the fullest rank, split
by rows with the remainder (not counted: buffers, and AdamW's step, 4 bytes a tensor). Estimates: activations, as
`cost.exact.activation_memory` says of them, in a pipeline of all micro-batches in flight, and communication buffers
(`comm_buffers`). Each part is the most of it at any time, and these times differ: the total is the most at one time.
Not in the total: a gradient that is added to another, libraries, the process; on a GPU, what the allocator reserves
beyond it and NCCL's buffers are `unused` and `nccl`."""

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
    """Bytes that a rank holds, by what for; each the most at any time."""

    parameters: int
    gradients: int
    optimizer: int
    """State, and with bf16 under zero1 and zero2 the fp32 rows that are trained."""
    activations: int = 0
    communication: int = 0
    """Buffers, and what was gathered and is given back."""
    offloaded: int = 0
    """Resting in CPU memory or files; not in `total`."""
    on_disk: int = 0
    """Of what is offloaded."""
    unused: int = 0
    """Reserved by CUDA's allocator beyond `total`: what one stream's tensors leave another's cannot use."""
    nccl: int = 0
    """Of NCCL's communicators on a GPU."""
    non_concurrent_bytes: int = 0
    """What the most of all parts add up to beyond the most of all of them at one time; below 0 where that is at the
    update, whose own needs are in no part."""
    checkpoint_copy: int = 0
    """In CPU memory, of a rank on a GPU: the copy of its state from which checkpoints are written."""

    @property
    def state(self) -> int:
        """Bytes that stay from step to step."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def working(self) -> int:
        """Bytes that come and go within a step."""
        return self.activations + self.communication

    @property
    def total(self) -> int:
        """Bytes on the device, the most at one time."""
        return self.state + self.working - self.non_concurrent_bytes

    @property
    def reserved(self) -> int:
        """Bytes that the allocator has on the device."""
        return self.total + self.unused

    @property
    def device(self) -> int:
        """Bytes of the device that the rank takes, but for what a driver takes of any process."""
        return self.reserved + self.nccl

    @property
    def host(self) -> int:
        """Bytes in CPU memory: what is offloaded there, and the copy for checkpoints."""
        return self.offloaded - self.on_disk + self.checkpoint_copy


def rank_memory(run: RunSpec, world_size: int) -> dict[str, RankMemory]:
    """What the fullest rank of each role holds: of "rank", with a parameter server of "server" and "worker", in a
    pipeline of "pp0", "pp1", ...: its first place, its second.

    Raises UserError if the layout cannot run on so many ranks.
    """
    check_layout(run, world_size)
    stage_memories = _stage_memories(run, world_size)
    if run.layout.data_parallel == "parameter_server":
        return {"server": _largest_server(run, world_size), "worker": stage_memories[0]}
    if run.layout.pp == 1:
        return {"rank": stage_memories[0]}
    return {f"pp{pp_rank}": memory for pp_rank, memory in enumerate(stage_memories)}


def worker_memories(run: RunSpec, world_size: int) -> list[RankMemory]:
    """Return what each kind of rank holds but servers, whose parameters are in CPU memory.

    Raises UserError as `rank_memory` does.
    """
    return [memory for role, memory in rank_memory(run, world_size).items() if role != "server"]


def rank_model_states(run: RunSpec, world_size: int) -> list[StateBytes]:
    """What the fullest rank that computes, at each place of the pipeline (one, without a pipeline), holds from step to
    step, before anything is offloaded. Exact."""
    micro_batches = plan_batch(run, world_size).gradient_accumulation_steps
    return [rank_model_state(run, rank, micro_batches) for rank in rank_tensors(run, world_size)]


def _stage_memories(run: RunSpec, world_size: int) -> list[RankMemory]:
    """Ranks that compute, one of each place of the pipeline."""
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
        else:  # what is exchanged inside blocks is among what is in flight
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
                reserved += state.gradients  # DDP makes its buckets anew in the second step, beside the first ones
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
    """What of a rank's state is there when. DDP's buckets are there all the time, and a parameter server's worker adds
    up in place; others drop gradients when they were used. What DDP drops for parts that a step leaves unused, the
    micro-batches before the last make anew outside its buckets. In a pipeline ZeRO-3 adds up whole gradients."""
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
    if rank.tied_embedding_copy is not None:  # its gradient, until that is sent to who trains it
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
    """What the fullest rank puts in files (`layout.offload = "nvme"`)."""
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
    """Of a micro-batch, in a pipeline on one of its stages."""
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
    """What a rank at each place of the pipeline has of activations."""
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
    """The server that holds most. A server is in CPU memory, whatever computes."""
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
