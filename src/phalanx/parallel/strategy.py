"""What every way of data parallelism offers its trainer, and the simplest of them: one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from phalanx.parallel.exposed import ExposedTime

WRAPPER = "_checkpoint_wrapped_module."


class Strategy:
    """A model on this rank, and what this rank's optimizers train of it.

    A step is: forward and backward passes inside `backward`, then `gradients` (to measure and clip), then `update`.
    As it stands here it is one process, the reference that every layout must equal.
    """

    loss_scale = 1.0
    """What the loss is multiplied by, so that gradients come out summed over ranks."""
    autocast = True
    """bf16 computes by autocast over fp32 parameters. False where the parameters that compute are bf16 themselves."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.model: nn.Module = module
        """What to call for a forward pass."""
        self.trained: dict[str, nn.Parameter] = dict(named_parameters(module))
        """What this rank's optimizers train, under the names of a model to which no layout was applied: whole
        parameters, or this rank's part of them (DTensors)."""
        self.exposed = ExposedTime()

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Around the forward and backward pass of a micro-batch; `last` of its step."""
        yield

    def gradients(self) -> list[Tensor]:
        """The summed gradient of what is trained; whoever scales it scales the step."""
        return [p.grad for p in self.trained.values() if p.grad is not None]

    def update(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Step, let the model compute with the result, and drop the gradients."""
        for optimizer in optimizers:
            optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget the gradients of this step."""
        self.module.zero_grad()

    def publish(self) -> None:
        """Let the model compute with what is trained, after somebody else than `update` changed that."""

    def new_state(self, parameter: nn.Parameter) -> Tensor:
        """Optimizer state of a trained parameter, not stepped yet: zeros like it, where such state rests."""
        return torch.zeros_like(parameter)

    def rest(self) -> None:
        """After forward passes that no backward pass follows: give back what was gathered for them."""


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


def step_with(
    optimizers: Iterable[torch.optim.Optimizer], parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]
) -> None:
    """Step only these parameters, with these gradients; the others' `grad` must be None."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for optimizer in optimizers:
        optimizer.step()
    for parameter in parameters:
        parameter.grad = None


def give_memory(module: nn.Module, device: torch.device, parameters_on: torch.device | None = None) -> None:
    """Move a module to a device, or give one without memory its memory there: parameters are not filled, buffers are 0.
    Parameters may rest elsewhere."""
    meta = any(parameter.is_meta for parameter in module.parameters())
    module.to_empty(device=parameters_on or device) if meta else module.to(parameters_on or device)
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.zeros_like(buffer, device=device) if meta else buffer.to(device)


class HasBytes(Protocol):
    """Something with a size in bytes: a tensor, a bucket."""

    @property
    def nbytes(self) -> int:
        """Its size."""


P = TypeVar("P", bound=HasBytes)


def pieces_of(items: Sequence[P], limit: int) -> list[list[P]]:
    """Neighbours of together up to `limit` bytes; what is larger stands alone."""
    pieces: list[list[P]] = []
    size = 0
    for item in items:
        if not pieces or size + item.nbytes > limit:
            pieces.append([])
            size = 0
        pieces[-1].append(item)
        size += item.nbytes
    return pieces
