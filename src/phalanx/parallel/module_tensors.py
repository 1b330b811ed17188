"""Tensors of a module: names without wrappers, materialization and replacement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

CHECKPOINT_WRAPPER_PREFIX = "_checkpoint_wrapped_module."


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters with their names in a model without a layout."""
    for name, parameter in module.named_parameters():
        yield name.replace(CHECKPOINT_WRAPPER_PREFIX, ""), parameter


def named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with their names in a model without a layout."""
    for name, submodule in module.named_modules():
        yield name.replace(CHECKPOINT_WRAPPER_PREFIX, ""), submodule


def named_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield persistent buffers with their names in a model without a layout."""
    persistent = set(module.state_dict())
    for name, buffer in module.named_buffers():
        if name.replace(CHECKPOINT_WRAPPER_PREFIX, "") in persistent:
            yield name.replace(CHECKPOINT_WRAPPER_PREFIX, ""), buffer


def optimizer_state_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """Return the tensors of optimizer state, without step counts."""
    states = (state for optimizer in optimizers for state in optimizer.state.values())
    return [value for state in states for value in state.values() if isinstance(value, Tensor) and value.ndim]


def step_parameters(
    optimizers: Iterable[torch.optim.Optimizer], parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]
) -> None:
    """Step only some parameters, whose `grad` is None afterwards; the other parameters' `grad` must be None.

    A parameter whose gradient is None is not stepped."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for optimizer in optimizers:
        optimizer.step()
    for parameter in parameters:
        parameter.grad = None


def materialize(module: nn.Module, device: torch.device, parameters_on: torch.device | None = None) -> None:
    """Move a module to a device, or allocate a meta module there. Parameters may go to another device, `parameters_on`.

    Allocated parameters are uninitialized, buffers are 0."""
    meta = any(parameter.is_meta for parameter in module.parameters())
    module.to_empty(device=parameters_on or device) if meta else module.to(parameters_on or device)
    if meta:
        for buffer in module.buffers():
            buffer.zero_()
    place_buffers(module, device)


def place_buffers(module: nn.Module, device: torch.device) -> None:
    """Move buffers to a device; meta buffers become 0."""
    for submodule in module.modules():
        for name, buffer in submodule._buffers.items():
            if buffer is not None:
                submodule._buffers[name] = (
                    torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
                )


def replace_parameter(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Replace a parameter (by identity) in all submodules that have it."""
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is old:
                submodule._parameters[name] = new
