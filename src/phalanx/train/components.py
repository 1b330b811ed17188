"""Import of the user's own components: model, loss, optimizer, learning-rate function, dataset, callbacks."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.spec.components import ComponentSpec, require_trusted
from phalanx.spec.errors import UserError
from phalanx.spec.run import RunSpec, TrainingSpec


def import_component(field: str, spec: ComponentSpec) -> Any:
    """Import a class or function by its path. Modules are found in the working directory too.

    `field` of the run file names it. Raises UserError if it cannot be imported, or only a run directory names it and
    the user did not trust it."""
    require_trusted(field, spec)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(import_module(spec.module), spec.name)
    except (ImportError, AttributeError) as error:
        fix = f"start in the directory of {spec.module.partition('.')[0]}, or install its package"
        raise UserError(field, spec.class_path, f"cannot be imported: {error}", fix) from error


def call_component(field: str, component: ComponentSpec, /, *positional: Any, **keywords: Any) -> Any:
    """Import a class or function, and call it with these arguments and those of its description.

    Raises UserError if it cannot be imported, or does not accept the arguments."""
    target = import_component(field, component)
    keywords = {**keywords, **component.arguments}
    _check_arguments(field, component, target, positional, keywords)
    return target(*positional, **keywords)


def bind_component(field: str, component: ComponentSpec, /, *examples: Any) -> Callable[..., Any]:
    """Import a function that is called later, and return it with the arguments of its description.

    `examples` are the positional arguments of a call, to check that it accepts them. Raises UserError if it cannot be
    imported, or does not accept the arguments."""
    function = import_component(field, component)
    _check_arguments(field, component, function, positional=examples, keywords=component.arguments)
    return partial(function, **component.arguments)


def _check_arguments(
    field: str, component: ComponentSpec, target: Any, positional: Sequence[Any], keywords: Mapping[str, Any]
) -> None:
    try:
        # Some built-in classes have no signature.
        with suppress(ValueError):
            inspect.signature(target).bind(*positional, **keywords)
    except TypeError as error:
        fix = f"use the arguments of {component.name}"
        raise UserError(field, component.class_path, f"does not accept these arguments: {error}", fix) from error


def build_loss(spec: TrainingSpec) -> Callable[[Tensor, Tensor, int], Tensor] | None:
    """Return the user's loss function with its arguments; None for cross-entropy."""
    if spec.loss is None:
        return None
    return bind_component("training.loss", spec.loss, None, None, 0)


def build_network(run: RunSpec, component: ComponentSpec) -> nn.Module:
    """Build the user's network, with equal weights on every rank.

    Raises UserError if it is not a module, or does not accept the documents that the run masks."""
    field = "model.implementation"
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):  # `phalanx.load_model` must not seed its caller
        torch.manual_seed(run.training.seed)
        network = call_component(field, component, spec=run.model)
    if not isinstance(network, nn.Module):
        raise UserError(field, component.class_path, "does not return a torch.nn.Module", "return a module")
    if run.data.mask_documents and "documents" not in inspect.signature(network.forward).parameters:
        problem = f"requires a forward method with the parameter `documents`, which {component.name} does not have"
        fix = "set data.mask_documents = false, or mask attention between documents in the module"
        raise UserError("data.mask_documents", True, problem, fix)
    return network
