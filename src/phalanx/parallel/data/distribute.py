"""Data parallelism of a layout, applied to any module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from phalanx.parallel.data.ddp import DDP, OverlappingReplica
from phalanx.parallel.data.fsdp import FSDP
from phalanx.parallel.data.offload import build_offload
from phalanx.parallel.data.parameter_server import build_parameter_server
from phalanx.parallel.data.sharding_checks import check_shardable_module
from phalanx.parallel.data.zero import ZeRO
from phalanx.parallel.expert.expert_parallel import expert_parameter_names
from phalanx.parallel.mesh import Mesh, build_mesh, current_device
from phalanx.parallel.module_tensors import materialize
from phalanx.parallel.strategy import Strategy
from phalanx.parallel.tensor.parameter_sharding import ModelSharding
from phalanx.spec.errors import UserError
from phalanx.spec.layout import FSDP_STRATEGIES, ZERO_STRATEGIES, Layout
from phalanx.spec.parallel_dims import transformer_only_options
from phalanx.spec.precision import BF16_PRECISIONS
from phalanx.spec.torch_compat import check_torch_supports


def distribute(
    module: nn.Module,
    layout: Layout,
    mesh: Mesh | None = None,
    device: torch.device | None = None,
    blocks: Sequence[nn.Module] = (),
    precision: str = "fp32",
) -> Strategy:
    """Apply the data parallelism of a layout to any module.

    Args:
        module: The module. Its weights must be equal on all ranks, or on the meta device. They are moved to `device`.
        layout: The layout: `data_parallel` and its options.
        mesh: The ranks. By default `build_mesh(layout)`.
        device: The device of this rank. By default the current GPU, or the CPU if there is none.
        blocks: The submodules that zero3 and hsdp gather one at a time: modules that are called, not lists of them.
        precision: "bf16" lets zero1 to zero3 compute in bf16 over fp32 state; the other strategies need
            `torch.autocast` around the forward pass. "fp32" and "fp64" compute in the dtype of the module.

    Returns:
        The strategy. Call `strategy.model` for a forward pass, give `strategy.trainable_parameters` to the optimizers,
        and train with `strategy.accumulate` and `strategy.step`.

    Raises:
        UserError: The layout cannot shard the module, or has a parallelism that only Phalanx's transformer supports.

    Example:
        >>> strategy = phalanx.distribute(torch.nn.Linear(4, 2), phalanx.Layout(data_parallel="zero1"))
        >>> strategy.model(torch.ones(8, 4)).shape
        torch.Size([8, 2])
        >>> phalanx.distribute(torch.nn.Linear(4, 2), phalanx.Layout(tp=2))
        Traceback (most recent call last):
        phalanx.spec.errors.UserError: layout.tp = 2 is for Phalanx's own transformer..."""
    for field, value, default in transformer_only_options(layout):
        applied = f"to {type(module).__name__}, distribute() applies only data parallelism"
        problem = f"is supported for Phalanx's transformer only: {applied}"
        raise UserError(f"layout.{field}", value, problem, f"use {default!r}, and implement it in the module")
    mesh = build_mesh(layout) if mesh is None else mesh
    device = current_device() if device is None else device
    return apply_data_parallelism(module, layout, mesh, device, blocks, precision)


def apply_data_parallelism(
    module: nn.Module,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    blocks: Sequence[nn.Module],
    precision: str,
    model_sharding: ModelSharding | None = None,
) -> Strategy:
    """Apply the data parallelism of a layout to a module on `device` or meta, and allocate memory.

    This is step 5 of `parallel.apply`. FSDP gathers the `blocks` one at a time. If ranks share the model,
    `model_sharding` describes their shards."""
    check_torch_supports(layout)
    check_shardable_module(module, layout, blocks)
    compute_dtype = torch.bfloat16 if precision in BF16_PRECISIONS else None
    shards = mesh.submesh("dp_replicate", "dp_shard") if mesh.data_dims.dp_shard > 1 else None
    offload = build_offload(layout)
    expert_parameters = expert_parameter_names(module) if layout.ep > 1 else frozenset()
    experts = expert_parameters, mesh.expert_dp_mesh
    if layout.data_parallel in FSDP_STRATEGIES and shards is not None:
        sharded = FSDP(module, blocks, layout, shards, compute_dtype, offload, mesh.dp_group, *experts)
        materialize(module, device, parameters_on=torch.device("cpu") if offload else device)
        return sharded
    if layout.data_parallel in ZERO_STRATEGIES or offload is not None:
        return ZeRO(module, layout, shards, device, compute_dtype, offload, *experts, model_sharding)
    if layout.data_parallel == "parameter_server":
        return build_parameter_server(module, layout, device)
    materialize(module, device)
    if mesh.dp_group is None:
        return Strategy(module)
    return (DDP if layout.pp == 1 else OverlappingReplica)(module, layout, mesh.dp_group, expert_parameters)
