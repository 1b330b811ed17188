"""The one page that says in which order a layout is applied to a model:

1. the transformer is made on the meta device, without memory; of a pipeline the stages of this rank;
2. ranks that share a model are left their share of each tensor, and those that train some of the experts these;
   tensor parallelism replaces products, expert parallelism layers of experts, context parallelism attention;
3. recomputation wraps its blocks;
4. blocks are compiled;
5. ZeRO-3 (or HSDP, over two axes of the mesh) splits its parameters;
6. memory is given;
7. the other ways of data parallelism take the replica;
8. the pipeline runs the stages over that;
9. every rank fills what it trains with its part of the initial weights, and what computes is made of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, distribute_tensor

from phalanx.model.transformer import Transformer
from phalanx.parallel.context import ContextRanks, split_sequences
from phalanx.parallel.data import DataParallel, Replica
from phalanx.parallel.expert import ExpertRanks, expert_names, split_experts
from phalanx.parallel.frozen import Own, dealt, fill_frozen, freeze_experts, of_own, placed
from phalanx.parallel.fsdp import FullySharded
from phalanx.parallel.gathered_heads import gather_heads
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.offload import CpuOffload, DiskOffload
from phalanx.parallel.parameter_server import parameter_server
from phalanx.parallel.parts import local
from phalanx.parallel.pipeline import Part, Pipeline
from phalanx.parallel.shares import Shares
from phalanx.parallel.split_backward import Later
from phalanx.parallel.splittable import refuse_unsplittable
from phalanx.parallel.strategy import Strategy, give_memory
from phalanx.parallel.tensor import TensorRanks, split_products
from phalanx.parallel.zero import ZeRO
from phalanx.schedule.named import any_schedule_of, schedule_of
from phalanx.spec.installed import refuse_unsupported
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec

DTYPES = {"bf16": torch.float32, "fp32": torch.float32, "fp64": torch.float64}
Weights = Callable[[str, torch.Size], Tensor]


def apply_layout(
    spec: ModelSpec,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    weights: Weights,
    precision: str = "bf16",
    compile: bool = False,
    layers: Sequence[range] = (),
    own: Own | None = None,
) -> Strategy:
    """A transformer under `layout`.

    `weights` gives the full initial value of each parameter by name; a rank keeps its part of it. `layers` are those of
    every stage, where there is a pipeline. Of experts those that are not its `own` are frozen.
    """
    if spec.moe is None or (own is not None and len(own.experts) == spec.moe.experts):
        own = None
    with torch.device("meta"):
        module = Transformer(spec) if layout.pp == 1 else make_part(spec, layout, mesh, layers)
        module.to(DTYPES[precision])
        shared = Shares(spec, layout, mesh) if layout.tp * layout.ep > 1 else None
        if shared is not None:
            shared.cut(module)
        here: list[tuple[int, ...]] = []
        if own is not None and spec.moe is not None:
            here = dealt(own.experts, spec.moe.experts, layout.ep)
            freeze_experts(module, own, here[mesh.experts["ep"].get_local_rank() if mesh.experts else 0], shared)
    tensor = experts = None
    if mesh.tp_group is not None:
        later = module.later if isinstance(module, Part) else Later()
        tensor = TensorRanks(mesh.tp_group, layout.sequence_parallel, spec.vocab, later)
        split_products(module, tensor, experts_whole=layout.ep > 1, heads_apart=layout.heads == "split")
        if layout.heads == "gathered":
            gather_heads(module, tensor)
    if mesh.experts is not None:
        experts = ExpertRanks(mesh.experts["ep"].get_group(), placed(here, device) if here else None)
        split_experts(module, experts)
    sequences = None if mesh.context is None else ContextRanks(mesh.context.get_group(), layout.context)
    if sequences is not None:
        split_sequences(module, sequences)
    recompute(module, layout.recompute)
    blocks = list(module.blocks.children())
    if compile:
        for block in blocks:
            block.compile()
    strategy = distribute(module, layout, mesh, device, blocks, precision)
    strategy.shared, strategy.tensor = shared, tensor
    for ranks in (tensor, experts, sequences):
        if ranks is not None:
            ranks.exposed = strategy.exposed
    if experts is not None:
        strategy.waits_by_name["all_to_all"], strategy.rows = experts.waits, experts.take_rows
    if isinstance(module, Part):
        strategy = make_pipeline(strategy, module, layout, mesh, precision, device)
    # Ranks that share sequences each count all of one, routers that are asked again in the backward pass twice.
    strategy.counted = layout.cp * (2 if layout.recompute == "full" else 1)
    if own is not None and spec.moe is not None:
        fill(strategy, of_own(weights, own, spec.moe.experts))
        fill_frozen(strategy.module, weights, spec.moe.experts)
    else:
        fill(strategy, weights)
    strategy.publish()
    return strategy


def distribute(
    module: nn.Module,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    blocks: Sequence[nn.Module] = (),
    precision: str = "fp32",
) -> Strategy:
    """Any module under the data parallelism of `layout`. Its weights must be equal on all ranks, or still on the meta
    device; `blocks` are the parts that ZeRO-3 gathers one at a time: modules that are called, not lists of them.

    Raises UserError for what a layout cannot hold.
    """
    refuse_unsupported(layout)
    refuse_unsplittable(module, layout, blocks)
    compute_dtype = torch.bfloat16 if precision == "bf16" else None
    shards = mesh.axes("dp_replicate", "dp_shard") if mesh.data.dp_shard > 1 else None
    offload = make_offload(layout)
    apart = expert_names(module) if layout.ep > 1 else frozenset()
    if layout.data in ("zero3", "hsdp") and shards is not None:
        sharded = FullySharded(
            module, blocks, layout, shards, compute_dtype, offload, mesh.dp_group, apart, mesh.same_experts
        )  # fmt: skip
        give_memory(module, device, parameters_on=torch.device("cpu") if offload else device)
        return sharded
    if layout.data in ("zero1", "zero2") or offload is not None:
        # A pipeline's micro-batches overlap: their gradients add up before they are split, as with ZeRO-1.
        stage = layout if layout.pp == 1 else layout.model_copy(update={"data": "zero1"})
        return ZeRO(module, stage, shards, device, compute_dtype, offload, apart, mesh.same_experts)
    if layout.data == "parameter_server":
        return parameter_server(module, layout, device)
    give_memory(module, device)
    if mesh.dp_group is None:
        return Strategy(module)
    return (DataParallel if layout.pp == 1 else Replica)(module, layout, mesh.dp_group, apart)


def make_part(spec: ModelSpec, layout: Layout, mesh: Mesh, layers: Sequence[range]) -> Part:
    """This rank's stages."""
    mine = any_schedule_of(layout).stages_of(mesh.pp_rank)
    return Part(spec, {stage: layers[stage] for stage in mine}, len(layers))


def make_pipeline(
    inner: Strategy, part: Part, layout: Layout, mesh: Mesh, precision: str, device: torch.device
) -> Pipeline:
    """The pipeline of this rank's stages with the others'."""
    assert mesh.loss_group is not None
    context = partial(computing, inner, precision, device)
    # Under autocast what is added up stays in the parameters' precision.
    dtype = torch.bfloat16 if precision == "bf16" and not inner.autocast else DTYPES[precision]
    like = torch.empty(0, dtype=dtype, device=device)
    some = any_schedule_of(layout)
    return Pipeline(inner, part, some, partial(schedule_of, layout), mesh.links, mesh.loss_group, context, like)


def make_offload(layout: Layout) -> CpuOffload | None:
    """Where the state of a run rests if not on its device."""
    if layout.offload == "none":
        return None
    return CpuOffload() if layout.offload == "cpu" else DiskOffload(Path(str(layout.offload_directory)))


def recompute(module: Transformer, mode: str) -> None:
    """Drop activations in the forward pass and compute them again in the backward pass (arXiv 1604.06174): of whole
    blocks (full), or of attention only (selective, arXiv 2205.05198)."""
    for name, block in list(module.blocks.named_children()):
        if mode == "full":
            setattr(module.blocks, name, checkpoint_wrapper(block))
        elif mode == "selective":
            block.attention = checkpoint_wrapper(cast(nn.Module, block.attention))


def fill(strategy: Strategy, weights: Weights) -> None:
    """Give what is trained its initial values, one full parameter at a time."""
    for name in strategy.trained:
        fill_one(strategy, name, weights)


@torch.no_grad()
def fill_one(strategy: Strategy, name: str, weights: Weights) -> None:
    """Give one of what is trained its value."""
    part = strategy.part(name, strategy.trained[name].detach())
    full = weights(name, part.shape).to(device=part.device, dtype=part.dtype)
    if isinstance(part, DTensor):
        # Every rank has the full value already: no source rank, no communication.
        full = distribute_tensor(full, part.device_mesh, part.placements, src_data_rank=None)
    local(part).copy_(local(full))


def computing(strategy: Strategy, precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Around forward passes: bf16 computation over fp32 parameters, where they are not cast otherwise."""
    if precision != "bf16" or not strategy.autocast:
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
