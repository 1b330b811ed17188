"""Passes of a pipeline rank's stages: forward, backward, or half of a backward pass, without communication."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from phalanx.model.dropout import dropping
from phalanx.parallel.pipeline.split_backward import WeightGradient, compute_weight_grads
from phalanx.parallel.pipeline.stage_module import StageModule
from phalanx.parallel.protocols import LossFunction, MicroBatchProtocol
from phalanx.parallel.strategy import Strategy
from phalanx.schedule.schedule import Action


@dataclass(frozen=True)
class SavedActivation:
    """The tensors of a micro-batch that a stage saves from its forward to its backward pass."""

    x: Tensor
    output: Tensor
    auxiliary: Tensor


@dataclass(kw_only=True)
class PipelineStepState:
    """The state of a running step on a rank."""

    micros: Sequence[MicroBatchProtocol]
    losses: LossFunction
    saved_activations: dict[tuple[int, int], SavedActivation] = field(default_factory=dict)
    """Saved activations by stage and micro-batch."""
    deferred_weight_grads: dict[tuple[int, int], list[WeightGradient]] = field(default_factory=dict)
    """Deferred second halves of backward passes, by stage and micro-batch."""
    losses_by_micro_batch: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    """Loss and auxiliary loss of each micro-batch in each of this rank's stages."""


class StagePasses:
    """Passes of this rank's stages under their data-parallel strategy."""

    def __init__(
        self,
        data_parallel: Strategy,
        stages: StageModule,
        forward_context: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """Create the passes; `forward_context` returns the context manager of forward passes."""
        self.data_parallel = data_parallel
        self.stages = stages
        self.forward_context = forward_context
        self.backward_scale = data_parallel.backward_scale

    def execute(self, action: Action, received: Tensor | None, state: PipelineStepState) -> Tensor | None:
        """Run an action, and return its output for another stage, if any.

        `received` is the input from another stage, if any: an activation, or the gradient of the stage's output."""
        key = action.stage, action.micro
        if action.kind == "F":
            return self._run_forward(action, received, state)
        if action.kind == "B":
            return self._run_backward(state.saved_activations.pop(key), received)
        if action.kind == "I":
            with self.stages.deferred_weight_grads.deferring() as deferred:
                state.deferred_weight_grads[key] = deferred
                return self._run_backward(state.saved_activations.pop(key), received)
        compute_weight_grads(state.deferred_weight_grads.pop(key))
        self.data_parallel.finish_weight_grad_pass()
        return None

    def _run_forward(self, action: Action, received: Tensor | None, state: PipelineStepState) -> Tensor:
        """Run a forward pass, save its activation and its losses, and return its output."""
        micro = state.micros[action.micro]
        x = micro.tokens if received is None else received.requires_grad_()
        activation = self.forward(action.stage, x, micro, losses=state.losses)
        state.saved_activations[action.stage, action.micro] = activation
        output = activation.output.detach()
        auxiliary = activation.auxiliary.detach()
        loss = output if action.stage == self.stages.last else 0 * auxiliary
        state.losses_by_micro_batch[action.micro].append(torch.stack([loss, auxiliary]))
        return output

    def _run_backward(self, activation: SavedActivation, output_grad: Tensor | None) -> Tensor | None:
        """Run a backward pass, and return the gradient of the stage's input."""
        if output_grad is None:
            self.backward_scale.run_backward(activation.output + activation.auxiliary)
        else:
            auxiliary_grad = torch.full_like(activation.auxiliary, self.backward_scale.factor)
            pairs = (activation.output, output_grad), (activation.auxiliary, auxiliary_grad)
            trained = [pair for pair in pairs if pair[0].requires_grad]
            torch.autograd.backward([out for out, _ in trained], [gradient for _, gradient in trained])
        return activation.x.grad

    def forward(self, stage: int, x: Tensor, micro: MicroBatchProtocol, losses: LossFunction) -> SavedActivation:
        """Return the output of a stage, or the loss if it is the last one.

        The input of the first stage is the tokens."""
        if stage == self.stages.last:
            model = self.data_parallel.model
            last_stage = partial(model, stage=stage)
            return SavedActivation(x, *losses(lambda _, *args, **options: last_stage(x, *args, **options), micro))
        with self.forward_context(), dropping(micro.token_keys):
            return SavedActivation(x, *self.data_parallel.model(x, micro.documents, stage=stage))
