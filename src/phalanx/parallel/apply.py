"""Application of a layout to a model, in this order of steps.

1. The transformer is created on the meta device, without memory; in a pipeline, only the stages of this rank.
2. Tensors are replaced by this rank's shards, and experts by those that are trained. Tensor parallelism replaces
   products, expert parallelism layers of experts, context parallelism attention. In fp8, products are replaced first.
3. Blocks are compiled.
4. Activation checkpointing wraps them.
5. The data-parallel strategy is applied, and memory is allocated. ZeRO-3 (or HSDP, over two axes of the mesh) shards
   the parameters and allocates the shards. ZeRO-1 and 2 allocate the rows that this rank trains, cast the model to the
   precision of its computation, allocate it, and register hooks. Other strategies allocate the replica and wrap it.
6. The strategy is connected to the groups of step 2. On GPUs its loss is compiled.
7. The pipeline runs the stages of this strategy.
8. Every rank fills its trained parameters with its part of the initial weights, and updates the model from them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from phalanx.model.compilation import compile_blocks
from phalanx.model.fp8 import use_fp8_products
from phalanx.model.transformer import Transformer
from phalanx.parallel.activation_checkpointing import apply_activation_checkpointing
from phalanx.parallel.context_parallel import ContextParallelGroup, apply_context_parallel
from phalanx.parallel.cross_entropy import EAGER, Kernels, compiled_kernels, in_place_cross_entropy
from phalanx.parallel.data.distribute import apply_data_parallelism
from phalanx.parallel.data.zero import ZeRO
from phalanx.parallel.expert.expert_parallel import ExpertParallelGroup, apply_expert_parallel
from phalanx.parallel.expert.partial_experts import (
    TrainedExperts,
    assign_experts_to_ranks,
    expert_permutation,
    freeze_experts,
    init_frozen_experts,
    select_trained_experts,
)
from phalanx.parallel.init_parameters import WeightInitializer, init_parameters
from phalanx.parallel.linear_cross_entropy import ChunkedLoss
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.pipeline.runtime import PipelineStrategy
from phalanx.parallel.pipeline.split_backward import DeferredWeightGrads
from phalanx.parallel.pipeline.stage_module import StageModule
from phalanx.parallel.protocols import ModelParallelism
from phalanx.parallel.strategy import Strategy
from phalanx.parallel.tensor.gathered_heads import apply_gathered_heads
from phalanx.parallel.tensor.parameter_sharding import ModelSharding
from phalanx.parallel.tensor.tensor_parallel import TensorParallelGroup, apply_tensor_parallel
from phalanx.schedule.registry import layout_compiles_whole_blocks, layout_schedule, representative_schedule
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.parallel_dims import effective_strategy
from phalanx.spec.precision import BF16_PRECISIONS, Precision

PARAMETER_DTYPES = {"bf16": torch.float32, "fp8": torch.float32, "fp32": torch.float32, "fp64": torch.float64}


def apply_layout(
    spec: ModelSpec,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    weights: WeightInitializer,
    precision: Precision = "bf16",
    compile: bool = False,
    layers: Sequence[range] = (),
    trained_experts: TrainedExperts | None = None,
) -> Strategy:
    """Build a transformer under a layout.

    Args:
        weights: Returns the full initial value of a parameter by its name; a rank keeps its part.
        compile: Compile the blocks, and on GPUs the loss.
        layers: The layers of every stage of a pipeline.
        trained_experts: The experts that are trained; the others are frozen. By default all are trained.
    """
    if spec.moe is None or (trained_experts is not None and len(trained_experts.experts) == spec.moe.num_experts):
        trained_experts = None
    layout = layout.replace(data_parallel=effective_strategy(layout, mesh.data_dims, precision))
    # Steps 1 and 2: the module on the meta device.
    sharded = _build_sharded_module(
        spec, layout, mesh, precision=precision, layers=layers, trained_experts=trained_experts
    )
    module = sharded.module
    groups = _apply_model_parallelism(sharded, spec, layout, mesh=mesh, device=device)
    # Steps 3 and 4: its blocks.
    recompute = layout.activation_checkpointing
    # Blocks are compiled inside the wrappers, whose recomputation then runs compiled code too.
    if compile and _compile_blocks(module, layout) and recompute == "norms":
        recompute = "none"  # the compiler recomputes norms
    recomputed = layout.recomputed_on_rank(mesh.pp_rank if layout.pp > 1 else 0, len(module.blocks))
    apply_activation_checkpointing(module, recompute, recomputed, saves_counts=layout.ep > 1, device=device)
    blocks = list(module.blocks.children())
    # Steps 5 and 6: its strategy.
    data_parallel = apply_data_parallelism(
        module, layout, mesh, device=device, blocks=blocks, precision=precision, model_sharding=sharded.sharding
    )
    if isinstance(data_parallel, ZeRO):
        data_parallel.overlap_gathers(module)
    _connect_model_parallelism(data_parallel, sharded.sharding, groups, layout=layout)
    kernels = compiled_kernels() if compile and device.type == "cuda" else EAGER
    _connect_loss(data_parallel, spec.vocab_size, groups.tensor, precision=precision, kernels=kernels)
    # Step 7.
    strategy = data_parallel
    if isinstance(module, StageModule):
        strategy = build_pipeline(data_parallel, module, layout, mesh=mesh, precision=precision, device=device)
    # Step 8.
    _init_weights(strategy, spec, weights, trained_experts=trained_experts)
    return strategy


def _compile_blocks(module: Transformer, layout: Layout) -> bool:
    """Compile the blocks (step 3), and return whether each one is compiled to one graph."""
    whole = layout_compiles_whole_blocks(layout)
    compile_blocks(module.blocks.children(), whole)
    return whole


def apply_layout_to_network(
    network: nn.Module, layout: Layout, mesh: Mesh, device: torch.device, precision: str, compile: bool = False
) -> Strategy:
    """Apply the data parallelism of a layout to a network of the user.

    The modules of its attribute `blocks`, if it has one, are gathered by ZeRO-3 and compiled one at a time.

    Args:
        network: The network, with equal weights on all ranks.
        compile: Compile the blocks, or the network if it has none.
    """
    named_blocks = getattr(network, "blocks", None)
    blocks = list(named_blocks.children()) if isinstance(named_blocks, nn.Module) else []
    network.to(PARAMETER_DTYPES[precision])
    for part in (blocks or [network]) if compile else ():
        part.compile()
    return apply_data_parallelism(network, layout, mesh, device=device, blocks=blocks, precision=precision)


@dataclass(frozen=True)
class _ShardedModule:
    """The part of the transformer on this rank, on the meta device."""

    module: Transformer
    sharding: ModelSharding | None
    """None if each rank has all weights of its stages."""
    experts_per_rank: list[tuple[int, ...]]
    """The experts of each expert-parallel rank where the replica trains only some experts; else empty."""


@dataclass(frozen=True)
class _ModelParallelGroups:
    """The groups of ranks that share a replica of the model, besides its pipeline."""

    tensor: TensorParallelGroup | None
    experts: ExpertParallelGroup | None
    sequences: ContextParallelGroup | None


def _build_sharded_module(
    spec: ModelSpec,
    layout: Layout,
    mesh: Mesh,
    precision: str,
    layers: Sequence[range],
    trained_experts: TrainedExperts | None,
) -> _ShardedModule:
    """Build this rank's stages, shards and experts on the meta device (steps 1 and 2)."""
    with torch.device("meta"):
        module = Transformer(spec) if layout.pp == 1 else build_stage_module(spec, layout, mesh, layers=layers)
        module.to(PARAMETER_DTYPES[precision])
        if precision == "fp8":
            use_fp8_products(module)
        sharding = ModelSharding(spec, layout, mesh) if layout.tp * layout.ep > 1 else None
        if sharding is not None:
            sharding.shard_parameters(module)
        experts_per_rank: list[tuple[int, ...]] = []
        if trained_experts is not None and spec.moe is not None:
            experts_per_rank = assign_experts_to_ranks(trained_experts.experts, spec.moe.num_experts, layout.ep)
            freeze_experts(
                module,
                trained_experts,
                experts_per_rank[mesh.ep_mesh["ep"].get_local_rank() if mesh.ep_mesh else 0],
                sharding=sharding,
            )
    return _ShardedModule(module, sharding, experts_per_rank)


def _apply_model_parallelism(
    sharded: _ShardedModule, spec: ModelSpec, layout: Layout, mesh: Mesh, device: torch.device
) -> _ModelParallelGroups:
    """Apply tensor, expert and context parallelism, in this order (step 2)."""
    module = sharded.module
    experts_per_rank = sharded.experts_per_rank
    tensor = experts = None
    if mesh.tp_group is not None:
        deferred_grads = module.deferred_weight_grads if isinstance(module, StageModule) else DeferredWeightGrads()
        tensor = TensorParallelGroup(
            mesh.tp_group, layout.sequence_parallel, spec.vocab_size, deferred_grads=deferred_grads
        )
        apply_tensor_parallel(
            module, tensor, unsharded_experts=layout.ep > 1, sharded_heads=layout.tp_attention == "split"
        )
        if layout.tp_attention == "gathered":
            apply_gathered_heads(module, tensor)
    if mesh.ep_mesh is not None:
        experts = ExpertParallelGroup(
            mesh.ep_mesh["ep"].get_group(), expert_permutation(experts_per_rank, device) if experts_per_rank else None
        )
        apply_expert_parallel(module, experts)
    sequences = None if mesh.cp_mesh is None else ContextParallelGroup(mesh.cp_mesh.get_group(), layout.cp_method)
    if sequences is not None:
        apply_context_parallel(module, sequences)
    return _ModelParallelGroups(tensor, experts, sequences)


def _connect_model_parallelism(
    strategy: Strategy, sharding: ModelSharding | None, groups: _ModelParallelGroups, layout: Layout
) -> None:
    """Connect a data-parallel strategy to the groups that share its module (step 6).

    This must precede `build_pipeline`: a pipeline uses the `model_parallel` and the timers of its data-parallel
    strategy, and already its constructor reads the shapes of shards."""
    strategy.model_parallel = ModelParallelism(
        sharding=sharding,
        tensor_parallel=groups.tensor,
        router_count_multiplicity=layout.cp,  # ranks that share sequences each count all of one
    )
    for group in (groups.tensor, groups.experts, groups.sequences):
        if group is not None:
            group.comm_wait = strategy.comm_wait
    if groups.experts is not None:
        strategy.model_parallel.wait_timers["all_to_all"] = groups.experts.all_to_all_wait
        strategy.model_parallel.pop_expert_rows = groups.experts.pop_row_count


def _connect_loss(
    strategy: Strategy, vocab_size: int, tp: TensorParallelGroup | None, precision: str, kernels: Kernels
) -> None:
    """Give a strategy the loss of a transformer's logits, and that of its head in chunks (step 6)."""
    strategy.cross_entropy = partial(in_place_cross_entropy, tp=tp, kernels=kernels, scale=strategy.backward_scale)
    strategy.head_loss = ChunkedLoss(
        columns=vocab_size if tp is None else -(-vocab_size // tp.size),
        itemsize=2 if precision in BF16_PRECISIONS else PARAMETER_DTYPES[precision].itemsize,
        tp=tp,
        kernels=kernels,
        scale=strategy.backward_scale,
    )


def _init_weights(
    strategy: Strategy, spec: ModelSpec, weights: WeightInitializer, trained_experts: TrainedExperts | None
) -> None:
    """Fill this rank's part of the initial weights, and the copies that are computed with (step 8)."""
    if trained_experts is not None and spec.moe is not None:
        init_parameters(strategy, select_trained_experts(weights, trained_experts, spec.moe.num_experts))
        init_frozen_experts(strategy.module, weights, spec.moe.num_experts)
    else:
        init_parameters(strategy, weights)
    strategy.sync_model_weights()


def build_stage_module(spec: ModelSpec, layout: Layout, mesh: Mesh, layers: Sequence[range]) -> StageModule:
    """Build this rank's stages.

    `layers` has the layers of every stage.
    """
    local_stages = representative_schedule(layout).stages_of(mesh.pp_rank)
    return StageModule(spec, {stage: layers[stage] for stage in local_stages}, len(layers))


def build_pipeline(
    data_parallel: Strategy, stage_module: StageModule, layout: Layout, mesh: Mesh, precision: str, device: torch.device
) -> PipelineStrategy:
    """Connect this rank's stages with those of the other ranks (step 7).

    `data_parallel` is already connected to the groups that share the model.
    """
    assert mesh.loss_group is not None
    # Under autocast the residual stream stays in the parameters' precision.
    computes_in_bf16 = precision in BF16_PRECISIONS and not data_parallel.autocast
    activation_dtype = torch.bfloat16 if computes_in_bf16 else PARAMETER_DTYPES[precision]
    return PipelineStrategy(
        data_parallel,
        stage_module,
        representative_schedule(layout),
        make_schedule=partial(layout_schedule, layout),
        p2p_groups=mesh.pipeline_groups,
        loss_group=mesh.loss_group,
        forward_context=partial(autocast_context, data_parallel, precision, device),
        activation_template=torch.empty(0, dtype=activation_dtype, device=device),
        cp_size=layout.cp,
    )


def autocast_context(strategy: Strategy, precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of forward passes: bf16 computation over fp32 parameters, unless cast otherwise."""
    if precision not in BF16_PRECISIONS or not strategy.data_parallel.autocast:
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
