"""The one page that says in which order a layout is applied to a model:

1. the model is made on the meta device, without memory;
2. recomputation wraps its blocks;
3. blocks are compiled;
4. ZeRO splits its parameters (or HSDP, over two axes of the mesh);
5. memory is given, and every rank fills its part of the initial weights;
6. DDP wraps the replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, distribute_tensor

from phalanx.model.transformer import Transformer
from phalanx.parallel.data import DataParallel
from phalanx.parallel.exposed import ExposedTime
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.zero import ZeRO3
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec

DTYPES = {"bf16": torch.float32, "fp32": torch.float32, "fp64": torch.float64}
WRAPPER = "_checkpoint_wrapped_module."
Weights = Callable[[str, torch.Size], Tensor]


class Strategy(Protocol):
    """What a way of data parallelism offers the trainer."""

    exposed: ExposedTime

    @property
    def model(self) -> nn.Module:
        """What to call for a forward pass."""

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by, so that gradients come out summed over ranks."""

    def backward(self, last: bool) -> AbstractContextManager[None]:
        """Around the forward and backward pass of a micro-batch; `last` of its step."""

    def rest(self) -> None:
        """After forward passes that no backward pass follows: give back what was gathered for them."""


class OneProcess:
    """No parallelism: the reference that every layout must equal."""

    loss_scale = 1.0

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.exposed = ExposedTime()

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        yield

    def rest(self) -> None:
        pass


def apply_layout(
    spec: ModelSpec,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    weights: Weights,
    precision: str = "bf16",
    compile: bool = False,
) -> tuple[Transformer, Strategy]:
    """Build the model under `layout`: the bare module, which owns the parameters, and the strategy that runs it.

    `weights` gives the full initial value of each parameter by name; a rank keeps its part of it.
    """
    with torch.device("meta"):
        module = Transformer(spec).to(DTYPES[precision])
    recompute(module, layout.recompute)
    if compile:
        for block in module.blocks:
            block.compile()
    shards = mesh.axes("dp_replicate", "dp_shard") if mesh.degrees.dp_shard > 1 else None
    strategy: Strategy
    if shards is not None:
        strategy = ZeRO3(module, shards, torch.bfloat16 if precision == "bf16" else None)
        fill(module, device, weights)
    else:
        fill(module, device, weights)
        group = mesh.dp_group
        strategy = OneProcess(module) if group is None else DataParallel(module, layout, group)
    return module, strategy


def recompute(module: Transformer, mode: str) -> None:
    """Drop activations in the forward pass and compute them again in the backward pass (arXiv 1604.06174): of whole
    blocks (full), or of attention only (selective, arXiv 2205.05198)."""
    for index, block in enumerate(module.blocks):
        if mode == "full":
            module.blocks[index] = checkpoint_wrapper(block)
        elif mode == "selective":
            block.attention = checkpoint_wrapper(cast(nn.Module, block.attention))


@torch.no_grad()
def fill(module: nn.Module, device: torch.device, weights: Weights) -> None:
    """Give a meta-device module its memory and its initial weights, one full parameter at a time."""
    module.to_empty(device=device)
    for name, parameter in named_parameters(module):
        full = weights(name, parameter.shape).to(device=device, dtype=parameter.dtype)
        if isinstance(parameter, DTensor):
            # Every rank has the full value already: no source rank, no communication.
            full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(full)
    for buffer in module.buffers():
        buffer.zero_()


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters under the names they have in a model to which no layout was applied."""
    for name, parameter in module.named_parameters():
        yield name.replace(WRAPPER, ""), parameter


def named_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that a checkpoint keeps, named likewise."""
    kept = set(module.state_dict())
    for name, buffer in module.named_buffers():
        if name.replace(WRAPPER, "") in kept:
            yield name.replace(WRAPPER, ""), buffer


def computing(module: nn.Module, strategy: Strategy, precision: str) -> AbstractContextManager[object]:
    """Around forward passes: bf16 computation over fp32 parameters. Sharded models cast as they gather instead."""
    if precision != "bf16" or isinstance(strategy, ZeRO3):
        return nullcontext()
    return torch.autocast(next(module.parameters()).device.type, dtype=torch.bfloat16)
