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
from functools import partial

import torch
from torch import nn

from phalanx.model.compilation import compile_blocks
from phalanx.model.fp8 import use_fp8_products
from phalanx.model.init import Weights
from phalanx.model.transformer import Transformer
from phalanx.parallel.activation_checkpointing import apply_activation_checkpointing
from phalanx.parallel.context_parallel import ContextParallelGroup, apply_context_parallel
from phalanx.parallel.cross_entropy import EAGER, compiled_kernels, in_place_cross_entropy
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
from phalanx.parallel.init_parameters import init_buffers, init_parameters
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
from phalanx.parallel.token_losses import token_losses, token_losses_of_head
from phalanx.schedule.registry import layout_compiles_whole_blocks, layout_schedule, representative_schedule
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.parallel_dims import replica_strategy, strategy_on_ranks
from phalanx.spec.parts.model import carried_tensors
from phalanx.spec.precision import BF16_PRECISIONS, Precision

PARAMETER_DTYPES = {"bf16": torch.float32, "fp8": torch.float32, "fp32": torch.float32, "fp64": torch.float64}


def apply_layout(
    spec: ModelSpec,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    weights: Weights,
    precision: Precision = "bf16",
    compile: bool = False,
    layers: Sequence[range] = (),
    trained_experts: TrainedExperts | None = None,
) -> Strategy:
    """Build a transformer under a layout.

    `weights` returns the full initial value of a parameter by its name, of which a rank keeps its part. `compile`
    compiles the blocks, and on GPUs the loss. `layers` are those of every stage of a pipeline. Experts other than
    `trained_experts`, if given, are frozen."""
    if spec.moe is None or (trained_experts is not None and len(trained_experts.experts) == spec.moe.num_experts):
        trained_experts = None
    on_ranks = strategy_on_ranks(layout, mesh.data_dims.dp_shard)
    effective = replica_strategy(on_ranks, precision, mesh.data_dims.dp_size * layout.ep)
    layout = layout.model_copy(update={"data_parallel": effective})
    experts_per_rank: list[tuple[int, ...]] = []
    with torch.device("meta"):
        # Step 1: the stages of this rank.
        module: Transformer
        if layout.pp == 1:
            module = Transformer(spec)
        else:
            local_stages = representative_schedule(layout).stages_of(mesh.pp_rank)
            module = StageModule(spec, {stage: layers[stage] for stage in local_stages}, len(layers))
        module.to(PARAMETER_DTYPES[precision])
        # Step 2: its shards and trained experts, then tensor, expert and context parallelism.
        if precision == "fp8":
            use_fp8_products(module)
        sharding = ModelSharding(spec, layout, mesh) if layout.tp * layout.ep > 1 else None
        if sharding is not None:
            sharding.shard_parameters(module)
        if trained_experts is not None and spec.moe is not None:
            experts_per_rank = assign_experts_to_ranks(trained_experts.experts, spec.moe.num_experts, layout.ep)
            ep_rank = mesh.ep_mesh["ep"].get_local_rank() if mesh.ep_mesh else 0
            freeze_experts(module, trained_experts, experts_per_rank[ep_rank], sharding)
    tp = ep = cp = None
    if mesh.tp_group is not None:
        deferred_grads = module.deferred_weight_grads if isinstance(module, StageModule) else DeferredWeightGrads()
        tp = TensorParallelGroup(mesh.tp_group, layout.sequence_parallel, spec.vocab_size, deferred_grads)
        apply_tensor_parallel(module, tp, layout)
        if layout.tp_attention == "gathered":
            apply_gathered_heads(module, tp)
    if mesh.ep_mesh is not None:
        permutation = expert_permutation(experts_per_rank, device) if experts_per_rank else None
        ep = ExpertParallelGroup(mesh.ep_mesh["ep"].get_group(), permutation)
        apply_expert_parallel(module, ep)
    if mesh.cp_mesh is not None:
        cp = ContextParallelGroup(mesh.cp_mesh.get_group(), layout.cp_method)
        apply_context_parallel(module, cp)
    # Steps 3 and 4: its blocks.
    recompute = layout.activation_checkpointing
    if compile:
        # Blocks are compiled inside the wrappers, whose recomputation then runs compiled code too.
        compiles_whole_blocks = layout_compiles_whole_blocks(layout)
        compile_blocks(module.blocks.children(), compiles_whole_blocks)
        if compiles_whole_blocks and recompute == "norms":
            # The compiler recomputes norms.
            recompute = "none"
    recomputed = layout.recomputed_on_rank(mesh.pp_rank if layout.pp > 1 else 0, len(module.blocks))
    apply_activation_checkpointing(module, recompute, recomputed, saves_counts=layout.ep > 1, device=device)
    blocks = list(module.blocks.children())
    # Step 5: its strategy.
    data_parallel = apply_data_parallelism(module, layout, mesh, device, blocks, precision, sharding)
    if isinstance(data_parallel, ZeRO):
        data_parallel.overlap_gathers(module)
    # Step 6, before a pipeline uses `model_parallel` and the timers, and reads the shapes of shards. Each of the ranks
    # that share sequences counts the choices of the whole sequence.
    data_parallel.model_parallel = ModelParallelism(
        sharding=sharding, tensor_parallel=tp, router_count_multiplicity=layout.cp
    )
    for group in (tp, ep, cp):
        if group is not None:
            group.comm_wait = data_parallel.comm_wait
    if ep is not None:
        data_parallel.model_parallel.wait_timers["all_to_all"] = ep.all_to_all_wait
        data_parallel.model_parallel.pop_expert_rows = ep.pop_row_count
    kernels = compiled_kernels() if compile and device.type == "cuda" else EAGER
    scale = data_parallel.backward_scale
    softcap = spec.logits_softcap
    data_parallel.cross_entropy = partial(in_place_cross_entropy, tp=tp, kernels=kernels, scale=scale, softcap=softcap)
    if softcap is not None:
        data_parallel.uncapped_logits = lambda x_BTD, weight_VD: module.logits(x_BTD, weight_VD)
    columns = spec.vocab_size if tp is None else -(-spec.vocab_size // tp.size)
    logit_bytes = 2 if precision in BF16_PRECISIONS else PARAMETER_DTYPES[precision].itemsize
    chunked = ChunkedLoss(columns=columns, itemsize=logit_bytes, tp=tp, kernels=kernels, scale=scale, softcap=softcap)
    data_parallel.head_loss = chunked
    data_parallel.token_losses = partial(token_losses, tp=tp, kernels=kernels, softcap=softcap)
    data_parallel.head_token_losses = partial(token_losses_of_head, chunked)
    # Step 7.
    strategy = data_parallel
    if isinstance(module, StageModule):
        strategy = build_pipeline(data_parallel, module, layout, mesh, precision, device)
    # Step 8: its weights.
    if trained_experts is not None and spec.moe is not None:
        init_parameters(strategy, select_trained_experts(weights, trained_experts, spec.moe.num_experts))
        init_frozen_experts(strategy.module, weights, spec.moe.num_experts)
    else:
        init_parameters(strategy, weights)
    if (spec.moe is not None and spec.moe.choice_bias) or spec.layer_scalars or carried_tensors(spec):
        init_buffers(strategy, weights)
    strategy.sync_model_weights()
    return strategy


def apply_layout_to_network(
    network: nn.Module, layout: Layout, mesh: Mesh, device: torch.device, precision: str, compile: bool = False
) -> Strategy:
    """Apply the data parallelism of a layout to a network of the user.

    The modules of its attribute `blocks`, if it has one, are gathered by ZeRO-3 and compiled one at a time. A network
    without blocks is compiled whole."""
    named_blocks = getattr(network, "blocks", None)
    blocks = list(named_blocks.children()) if isinstance(named_blocks, nn.Module) else []
    network.to(PARAMETER_DTYPES[precision])
    for unit in (blocks or [network]) if compile else ():
        unit.compile()
    return apply_data_parallelism(network, layout, mesh, device, blocks, precision)


def build_pipeline(
    data_parallel: Strategy, stage_module: StageModule, layout: Layout, mesh: Mesh, precision: str, device: torch.device
) -> PipelineStrategy:
    """Connect this rank's stages with those of the other ranks (step 7).

    `data_parallel` is already connected to the groups that share the model."""
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
