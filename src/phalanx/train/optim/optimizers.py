"""Optimizers of the parameters, and their learning rates."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.spec.parameter_shapes import has_weight_decay, is_muon_parameter
from phalanx.spec.phases import RateSpan
from phalanx.spec.run import OptimizerSpec
from phalanx.train.components import bind_component, call_component
from phalanx.train.optim.muon import Muon

LearningRateFunction = Callable[[int, int], float]
"""Returns the learning rate as a share of the peak, from the step (from 0) and the number of steps."""


def learning_rate_factor(
    spec: OptimizerSpec, step: int, steps: int, lr_function: LearningRateFunction | None = None
) -> float:
    """Return the learning rate of `step` (from 0) as a share of the peak.

    A linear warm-up is followed by `lr_function` or `spec.lr_schedule`. wsd (arXiv 2404.06395) stays at the peak, and
    falls linearly in the last `lr_decay_fraction` of the steps, or after the warm-up if that leaves fewer."""
    warmup_steps = spec.warmup_within(steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if lr_function is not None:
        return float(lr_function(step, steps))
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    if spec.lr_schedule == "none":
        return 1.0
    if spec.lr_schedule == "cosine":
        decay = (1 - math.cos(math.pi * progress)) / 2
    elif spec.lr_schedule == "linear":
        decay = progress
    else:
        decay_steps = min(spec.lr_decay_fraction * steps, steps - warmup_steps)
        decay = max(0.0, 1 - (steps - step) / decay_steps)
    return 1.0 - (1.0 - spec.min_lr_ratio) * decay


def learning_rate_ratio(spans: Sequence[RateSpan], step: int, lr_function: LearningRateFunction | None = None) -> float:
    """Return the learning rate of `step` (from 0) as a share of the run's peak, under its schedules in order.

    `lr_function` replaces the first schedule. A later one starts from the rate of the step before it, which is also its
    peak unless it has another; with a warm-up it reaches its peak linearly."""
    rate = 0.0
    for span in spans:
        before = rate
        peak = before if span.peak is None else span.peak
        local_step = (step if step < span.end or span is spans[-1] else span.end - 1) - span.first_step
        warmup_steps = span.optimizer.warmup_within(span.end - span.first_step)
        if local_step < warmup_steps:
            rate = before + (peak - before) * (local_step + 1) / warmup_steps
        else:
            function = lr_function if span.optimizer.lr_function else None
            rate = peak * learning_rate_factor(span.optimizer, local_step, span.end - span.first_step, function)
        if step < span.end:
            break
    return rate


def build_lr_function(spec: OptimizerSpec) -> LearningRateFunction | None:
    """Return the user's learning-rate function with its arguments; None for `lr_schedule`."""
    if spec.lr_function is None:
        return None
    return bind_component("optimizer.lr_function", spec.lr_function, 0, 1)


@dataclass(frozen=True)
class LearningRateRescaling:
    """A factor of learning rates, which changes linearly in the steps after a change of ranks.

    Source: the gradual warm-up of arXiv 1706.02677, section 2.2."""

    before: float
    after: float
    since: int
    steps: int

    def factor_at(self, step: int) -> float:
        """Return the factor of `step` (from 0)."""
        progress = min(1.0, (step - self.since + 1) / self.steps) if self.steps else 1.0
        return self.before + (self.after - self.before) * progress


def build_optimizers(
    spec: OptimizerSpec,
    parameters: dict[str, nn.Parameter],
    as_global: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the parameters. Matrices have weight decay, vectors do not.

    `as_global` returns a parameter as part of the tensor of the full model (`ModelParallelism.as_global_dtensor`)."""
    if not parameters:
        return []
    if spec.implementation is not None:
        groups = _build_parameter_groups(spec, parameters)
        return [call_component("optimizer.implementation", spec.implementation, groups, lr=spec.learning_rate)]
    if spec.name == "muon":
        matrices = {name: p for name, p in parameters.items() if is_muon_parameter(name, p.shape)}
        remaining = {name: p for name, p in parameters.items() if name not in matrices}
        optimizers: list[torch.optim.Optimizer] = []
        if matrices:
            global_matrices = [as_global(name, p.detach()) for name, p in matrices.items()]
            lr = spec.muon_learning_rate
            optimizers.append(Muon(list(matrices.values()), lr, spec.momentum, spec.weight_decay, global_matrices))
        if remaining:
            optimizers.append(_build_adamw(spec, remaining))
        return optimizers
    if spec.name == "adamw":
        return [_build_adamw(spec, parameters)]
    # DTensor has no rule for fused SGD.
    return [
        torch.optim.SGD(
            _build_parameter_groups(spec, parameters), lr=spec.learning_rate, momentum=spec.momentum, foreach=True
        )
    ]


def _build_adamw(spec: OptimizerSpec, parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    groups = _build_parameter_groups(spec, parameters)
    return torch.optim.AdamW(groups, lr=spec.learning_rate, betas=spec.betas, eps=spec.eps, fused=True)


def _build_parameter_groups(spec: OptimizerSpec, parameters: dict[str, nn.Parameter]) -> list[dict[str, object]]:
    groups: dict[tuple[bool, float], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in parameters.items():
        decay = spec.weight_decay if has_weight_decay(name, parameter.shape) else 0.0
        # One call cannot step both full and sharded parameters.
        groups[isinstance(parameter, DTensor), decay].append(parameter)
    return [{"params": params, "weight_decay": decay} for (_, decay), params in groups.items()]


def can_skip_on_device(optimizers: list[torch.optim.Optimizer]) -> bool:
    """Return whether all optimizers are able to skip a step without the host's help (`skip_if`)."""
    return bool(optimizers) and all(
        type(optimizer) is torch.optim.AdamW and optimizer.defaults["fused"] for optimizer in optimizers
    )


def skip_if(optimizers: list[torch.optim.Optimizer], condition: Tensor) -> None:
    """Let the next step of fused AdamW change nothing if a condition holds, without the host's help.

    `condition` is a boolean scalar on the device of `optimizers` (`can_skip_on_device`)."""
    for optimizer in optimizers:  # as torch.amp.GradScaler does
        optimizer.found_inf = condition.to(torch.float32)  # type: ignore[attr-defined]


def set_learning_rate(optimizers: list[torch.optim.Optimizer], ratio: float) -> None:
    """Set the learning rate of every group to its peak times `ratio`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("peak_lr", group["lr"]) * ratio
