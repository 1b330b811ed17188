"""Interface of data-parallel strategies for the trainer, and the strategy of a single process.

Why: `docs/design/decisions/strategy-object.md` and `docs/design/decisions/summed-losses.md`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.dtypes import at_least_fp32
from phalanx.model.part import PartModule
from phalanx.model.transformer import HeadFunction
from phalanx.parallel.comm.collectives import start_all_reduce
from phalanx.parallel.comm.device_clock import HOST_CLOCK, DeviceClock, Timestamp
from phalanx.parallel.comm.wait_timer import WaitTimer
from phalanx.parallel.cross_entropy import UNSCALED, LossTerms
from phalanx.parallel.dtensor_shards import local_tensor
from phalanx.parallel.grad_norm import clip_coefficient, global_grad_norm, scale_gradients
from phalanx.parallel.module_tensors import named_parameters, optimizer_state_tensors
from phalanx.parallel.protocols import LossFunction, MicroBatchProtocol, ModelParallelism
from phalanx.parallel.step_result import StepResult
from phalanx.parallel.token_losses import token_losses
from phalanx.schedule.schedule import Action, ScheduleStep


@dataclass(frozen=True, kw_only=True)
class StepReduction:
    """The result of a step over all ranks."""

    norm: Tensor
    """Norm of the gradient of the mean, before clipping; a scalar."""
    sums: Tensor
    """Sums over ranks of their measured values."""
    steps_behind: int = 0
    """Age of the result in steps: an asynchronous worker receives results late."""
    staleness: int | None = None
    """Number of updates that the oldest weights behind this gradient lacked (asynchronous servers)."""


class Strategy:
    """A module on this rank, and the parameters that the optimizers of this rank train.

    A step is: forward and backward passes of summed losses inside `accumulate`, then `step`. The trainer calls the
    pieces of `step` itself: `reduce`, then `update` or `zero_grad`; it also scales its losses by `loss_scale`.
    This class is one process, the reference that every layout must equal; in bf16 a transformer has `ZeRO` instead.

    Example:
        >>> strategy = phalanx.distribute(torch.nn.Linear(4, 1), phalanx.Layout(data_parallel="zero2"))
        >>> sorted(strategy.trainable_parameters)
        ['bias', 'weight']
        >>> optimizer = torch.optim.AdamW(strategy.trainable_parameters.values(), lr=0.1)
        >>> for micro_batch in range(2):
        ...     with strategy.accumulate(last=micro_batch == 1):
        ...         loss = strategy.model(torch.ones(8, 4)).square().sum()
        ...         loss.backward()
        >>> result = strategy.step([optimizer], 2 * loss, num_tokens=16, max_grad_norm=1.0)
        >>> f"{result.loss:.3f}" == f"{loss / 8:.3f}"
        True"""

    runs_model = True
    """True if this rank runs forward and backward passes."""

    has_loss = True
    """True if this rank computes the loss; in a pipeline only the rank with the last stage does."""

    pipeline_wait: WaitTimer | None = None
    """Time in which this rank waited for the other stages of a pipeline."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        """Create the strategy; `group` has the ranks over which it sums values, and gradients of replicas."""
        self.module = module
        self.group = group
        self.model: nn.Module = module
        """Module to call for a forward pass."""
        parameters = dict(named_parameters(module))
        self.trainable_parameters: dict[str, nn.Parameter] = {
            name: parameter for name, parameter in parameters.items() if parameter.requires_grad
        }
        """Parameters of this rank's optimizers, by their names in a model without a layout.

        They are full parameters, or this rank's shards of them (DTensors)."""
        self.frozen_parameters: dict[str, nn.Parameter] = {
            name: parameter for name, parameter in parameters.items() if not parameter.requires_grad
        }
        """Parameters without gradients and state, by the same names."""
        self.comm_wait = WaitTimer()
        """Time in which this rank waited for communication other than between stages of a pipeline."""
        self.model_parallel = ModelParallelism()
        """The ranks that share the model."""
        self.clock: DeviceClock = HOST_CLOCK
        self.autocast = True
        """True if bf16 uses autocast over fp32 parameters; False if the computing parameters are bf16.

        Why: `docs/design/decisions/two-meanings-of-bf16.md`."""
        self.backward_scale = UNSCALED
        """Factor of the loss in backward passes, which makes gradients sums over ranks."""
        self.cross_entropy: Callable[[Tensor, Tensor, int, LossTerms | None], Tensor] = cross_entropy
        """Function of the logits [B, T, V], or this rank's columns, the targets, the target to ignore, and terms.

        It returns their loss, weighted and summed, also by group, as the terms say. The logits of a transformer are
        overwritten."""
        self.uncapped_logits: HeadFunction | None = None
        """The head whose logits `cross_entropy` caps; None: it is the model's own head."""
        self.head_loss: HeadLoss = no_head_loss
        """Function of the targets, the target to ignore, and terms: their loss without all logits in memory.

        None: all logits fit (`cross_entropy`), unless there is a teacher, the fourth argument."""
        self.token_losses: Callable[[Tensor, Tensor, int], Tensor] = token_losses
        """Function of the logits as `cross_entropy` has them, the targets, and the target to ignore: the loss of each
        token, [B, T]."""
        self.head_token_losses: Callable[[Tensor, int], HeadFunction | None] = no_head_token_losses
        """Function of the targets and the target to ignore: `token_losses` without all logits in memory, as
        `head_loss`."""
        self.timeline: list[tuple[ScheduleStep, Timestamp, Timestamp]] = []
        """The passes of this rank in the last step, with start and end by its clock."""

    @property
    def loss_scale(self) -> float:
        """Factor of the loss in backward passes, which makes gradients sums over ranks."""
        return self.data_parallel.backward_scale.factor

    @property
    def stored_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that have initial values and are in checkpoints: the trained and the frozen ones."""
        return self.trainable_parameters | self.frozen_parameters

    @property
    def data_parallel(self) -> Strategy:
        """The strategy of the ranks with the same part of the model: this one, except for a pipeline."""
        return self

    def forward_backward(
        self, micros: Sequence[MicroBatchProtocol], losses: LossFunction
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Run the passes of a step's micro-batches, and yield the detached results of `losses`.

        The passes of a micro-batch run before its result is yielded; a pipeline runs all passes before the first."""
        self.timeline = []
        for index, micro in enumerate(micros):
            start = self.clock.record()
            with self.accumulate(last=index == len(micros) - 1):
                loss, auxiliary = losses(self.model, micro)
                backward_start = self.clock.record()
                self.backward_scale.run_backward(loss + auxiliary)
            end = self.clock.record()
            self.timeline += [
                (Action(0, "F", index), start, backward_start),
                (Action(0, "B", index), backward_start, end),
            ]
            yield loss.detach(), auxiliary.detach()

    def run_head(self, tokens_BT: Tensor, head: HeadFunction | None) -> Tensor | None:
        """Return the result of a transformer's head for some tokens, by default this rank's columns of the logits.

        None on ranks without the head of a pipeline."""
        return cast(Tensor, self.module(tokens_BT, head=head)[0])

    def send_from_head(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the rank that has the head, on all ranks of a pipeline."""
        return tensor

    def holds_in_all_stages(self, condition: bool) -> bool:
        """Return whether a condition holds on all ranks of a pipeline."""
        return condition

    def evaluate_micro_batch(self, micro: MicroBatchProtocol, losses: LossFunction) -> Tensor:
        """Return the loss of a micro-batch without a backward pass; 0 on a rank without the last stage."""
        return losses(self.model, micro)[0]

    def finish_weight_grad_pass(self) -> None:
        """Finish a backward pass of weights alone, such as the second half of a split pass."""

    def end_rehearsal(self) -> None:
        """Clean up after backward passes that only loaded kernels, and left gradients of zero."""

    def add_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add a gradient that another rank computed to this rank's gradient of a parameter of `module`.

        Call it after the passes of a step and before `finalize_gradients`. A strategy may store the gradient elsewhere
        than in `parameter.grad`, so its callers must not write there."""
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def finalize_gradients(self) -> None:
        """Reduce gradients after a step whose backward passes were all run with `last` False."""

    @contextmanager
    def accumulate(self, last: bool = True) -> Iterator[None]:
        """Add the gradients of a micro-batch: run its forward and backward pass inside this context.

        Most strategies communicate only in the `last` micro-batch of a step."""
        yield

    def step(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        loss_sum: Tensor | float,
        num_tokens: Tensor | float,
        max_grad_norm: float = 0.0,
    ) -> StepResult:
        """Sum gradients over ranks, divide them by the number of tokens, clip them, and step the optimizers.

        Call it on every rank, after the backward passes of summed losses inside `accumulate`. The losses are not scaled
        by `loss_scale`.

        Args:
            optimizers: The optimizers of `trainable_parameters`.
            loss_sum: The loss of this rank, summed over its tokens (or samples) of the step.
            num_tokens: The number of these tokens. It may differ between ranks.
            max_grad_norm: The maximum norm of the gradient of the mean loss; 0 does not clip.

        Returns:
            The mean loss, the gradient norm before clipping, and the number of tokens, over all ranks."""
        device = loss_sum.device if isinstance(loss_sum, Tensor) else next(self.module.parameters()).device
        # Gradients of a loss that was not scaled are smaller by `loss_scale`: so is what divides them.
        values = (num_tokens / self.loss_scale, loss_sum)
        sums = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device).detach() for value in values])
        reduced = self.reduce(sums, max_grad_norm)
        self.update(optimizers)
        num_tokens = reduced.sums[0] * self.loss_scale
        return StepResult(reduced.sums[1] / num_tokens, reduced.norm, num_tokens)

    def gradients(self) -> dict[str, Tensor]:
        """Return the summed gradients of trained parameters by name; scaling them in place scales the step."""
        return {name: p.grad for name, p in self.trainable_parameters.items() if p.grad is not None}

    def reduce_partial_gradients(self) -> None:
        """Sum gradients of which several ranks that share the model have a term each.

        The order is that of names, equal on all ranks: with offload each rank has its gradients in a different order.
        """
        sharding = self.model_parallel.sharding
        if sharding is not None:
            terms: dict[tuple[dist.ProcessGroup, torch.dtype], list[Tensor]] = defaultdict(list)
            for name, gradient in sorted(self.gradients().items()):
                group = sharding.gradient_reduce_group(name)
                if group is not None:
                    terms[group, gradient.dtype].append(local_tensor(gradient))
            for (group, _), partial_gradients in terms.items():
                start_all_reduce(partial_gradients, group, self.comm_wait)()

    def grad_norm(self) -> Tensor:
        """Return the norm of the gradient of the full model (a scalar)."""
        gradients = sorted(self.gradients().items())
        if not gradients:  # a stage of frozen parameters, whose norm other stages sum in their precision
            dtypes = {parameter.dtype for parameter in self.stored_parameters.values()}
            return torch.zeros((), dtype=torch.float64 if torch.float64 in dtypes else torch.float32)
        as_global = self.model_parallel.as_global_dtensor
        return global_grad_norm([as_global(name, gradient) for name, gradient in gradients], self.comm_wait)

    def reduce(self, sums: Tensor, clip_norm: float = 0.0) -> StepReduction:
        """Sum values over ranks, and normalize and clip the gradients.

        The gradient of the summed losses becomes that of their mean over the first of `sums`, which are in fp64. Only
        sums are divided, never values per rank or micro-batch, because their numbers of tokens may differ. A
        `clip_norm` of 0 clips nothing."""
        self.reduce_partial_gradients()
        norm = self.grad_norm()
        if self.group is not None:
            with self.comm_wait.measure():
                dist.all_reduce(sums, group=self.group)
        self.model_parallel.sync_scalars(sums)
        return StepReduction(norm=self.normalize_and_clip(norm, sums[0], clip_norm), sums=sums)

    def normalize_and_clip(self, norm: Tensor, weight: Tensor, clip_norm: float) -> Tensor:
        """Divide the gradients and their `norm` by `weight`, clip the gradients, and return the norm before clipping.

        A `clip_norm` of 0 clips nothing."""
        norm = norm / weight.to(norm.dtype)
        scale_gradients(list(self.gradients().values()), clip_coefficient(norm, clip_norm) / weight.to(norm.dtype))
        return norm

    def update(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Step the optimizers, update the model's weights, and drop the gradients."""
        for optimizer in optimizers:
            optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop the gradients of this step."""
        self.module.zero_grad()

    def sync_model_weights(self) -> None:
        """Copy the trained parameters to the model after a change other than by `step`."""

    def wait_for_weights(self) -> None:
        """Finish the last update on all ranks, before code other than a forward pass reads parameters of `module`."""

    def drain_pending_updates(self) -> None:
        """Wait for all updates, also asynchronous ones: before any work other than a step, and at the end."""
        self.wait_for_weights()

    def init_optimizer_state(self, parameter: nn.Parameter) -> Tensor:
        """Return initial optimizer state of a parameter: zeros, in the storage of such state."""
        return torch.zeros_like(parameter)

    @cached_property
    def _parameter_tables(self) -> list[dict[str, nn.Parameter | None]]:
        """Return the `_parameters` tables of the modules that have parameters, in which FSDP2 replaces entries.

        A recorder of memory reads them after every collective; a search through all modules takes far longer."""
        return [submodule._parameters for submodule in self.module.modules() if submodule._parameters]

    @cached_property
    def carried_tensors(self) -> list[Tensor]:
        """Tensors that are loaded and saved with the model, and not trained."""
        parts = (module for module in self.module.modules() if isinstance(module, PartModule))
        return [part.get_buffer(name) for part in parts for name in part.part.carried]

    def resident_tensors(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, list[Tensor]]:
        """Return the tensors that this rank keeps between steps, by part."""
        parameters = [p for table in self._parameter_tables for p in table.values() if p is not None]
        return {
            "parameters": [*parameters, *self.trainable_parameters.values(), *self.carried_tensors],
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer": optimizer_state_tensors(optimizers),
        }


HeadLoss = Callable[..., HeadFunction | None]


def no_head_loss(targets_BT: Tensor, ignored: int, terms: LossTerms | None, teacher: object = None) -> None:
    """Return that no function computes the loss from the head's input: all logits fit."""


def no_head_token_losses(targets_BT: Tensor, ignored: int) -> None:
    """Return that no function computes losses from the head's input: all logits fit."""


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor, ignored: int, terms: LossTerms | None = None) -> Tensor:
    """Return the negative log-likelihood of the targets other than `ignored` in nats, summed, at least in fp32."""
    logits = at_least_fp32(logits_BTV.flatten(0, 1))
    if terms is None:
        return F.cross_entropy(logits, targets_BT.flatten(), ignore_index=ignored, reduction="sum")
    loss_N = F.cross_entropy(logits, targets_BT.flatten(), ignore_index=ignored, reduction="none")
    return terms.weigh(loss_N).sum()
