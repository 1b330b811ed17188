"""Roles of workers and parameter servers, and their messages: flat buffers, their views, sends and receives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.model.part import modules_declaring
from phalanx.spec.parts.operations import Route

Shapes = dict[str, torch.Size]


@dataclass(frozen=True, kw_only=True)
class ServerTopology:
    """The roles of ranks and their process groups (`docs/design/decisions/parameter-server-ranks.md`)."""

    servers: list[int]
    workers: list[int]
    owned: list[Shapes]
    """The parameters of each server."""
    groups: list[dist.ProcessGroup]
    """For each server, the group of the server and all workers."""
    server_group: dist.ProcessGroup
    staleness: int | None
    """Maximum number of updates that a worker's weights may lack; None: it waits for every update."""


def flatten_parameters(parameters: dict[str, nn.Parameter], shapes: Shapes, device: torch.device) -> Tensor:
    """Concatenate the parameters of `shapes` into a vector, with zeros for parameters without memory."""
    dtype = next(iter(parameters.values())).dtype
    vector = torch.zeros(sum(shape.numel() for shape in shapes.values()), dtype=dtype, device=device)
    for name, view in parameter_views(vector, shapes).items():
        if not parameters[name].is_meta:
            view.copy_(parameters[name].detach())
    return vector


def parameter_views(vector: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    """Return the views of a flat vector by parameter name."""
    flat_parameters = vector.split([shape.numel() for shape in shapes.values()])
    return {name: flat.view(shape) for (name, shape), flat in zip(shapes.items(), flat_parameters, strict=True)}


def router_biases(module: nn.Module) -> list[Tensor]:
    """Return the router biases, which a server updates and sends with its weights.

    An asynchronous worker does not receive every update, so it cannot compute them."""
    return [router.bias for router in modules_declaring(module, Route) if router.moe.bias_update_rate]


def receive_buffer(weights: Tensor) -> Tensor:
    """Return the buffer for received weights: the weights themselves, or CPU memory for a GPU's."""
    return weights if weights.device.type == "cpu" else torch.empty_like(weights, device="cpu")


def isend(tensor: Tensor, destination: int, tag: int) -> dist.Work:
    """Start to send a tensor to a global rank; it must not change until the work is complete."""
    work = dist.isend(tensor, destination, tag=tag)
    assert work is not None
    return work


def irecv(tensor: Tensor, source: int, tag: int) -> dist.Work:
    """Start to receive a tensor from a global rank."""
    work = dist.irecv(tensor, source, tag=tag)
    assert work is not None
    return work


def first_tag(step: int) -> int:
    """Return the tag of a step's message. The tag of its vector is the next number."""
    return 2 * step


def send_pair(message: Tensor, vector: Tensor, destination: int, tag: int) -> list[dist.Work]:
    """Start to send a message and its vector of gradients or weights; neither may change until the work is complete."""
    return [isend(message, destination, tag), isend(vector, destination, tag + 1)]


@dataclass(frozen=True)
class MessagePair:
    """A message and its vector in transfer."""

    message: Tensor
    vector: Tensor
    """Gradients or weights."""
    works: list[dist.Work]

    def wait(self) -> None:
        """Wait until both are complete."""
        for work in self.works:
            work.wait()
