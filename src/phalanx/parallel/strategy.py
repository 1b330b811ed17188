"""What every way of data parallelism offers its trainer, and the simplest of them: one process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.attention import Documents
from phalanx.parallel.comm.collectives import start_all_reduce
from phalanx.parallel.comm.device_clock import HOST_CLOCK, DeviceClock, Timestamp
from phalanx.parallel.comm.wait_timer import WaitTimer
from phalanx.parallel.dtensor_shards import local_tensor
from phalanx.parallel.grad_norm import clip_coefficient, global_grad_norm, scale_gradients
from phalanx.parallel.module_tensors import named_parameters, optimizer_state_tensors
from phalanx.schedule.schedule import Action, ScheduleStep


class MicroBatchProtocol(Protocol):
    """What the model needs of one: token ids [B, T], and its documents (see Transformer.forward)."""

    @property
    def tokens(self) -> Tensor: ...

    @property
    def documents(self) -> Documents | None: ...


LossFunction = Callable[[Callable[..., Any], Any], tuple[Tensor, Tensor]]
"""Runs a micro-batch, its second argument, through the first as the model; returns the loss and the auxiliary loss."""


@dataclass(frozen=True)
class StepReduction:
    """What a step came to over all ranks."""

    norm: Tensor
    """Of the gradient of the mean, before clipping; a scalar."""
    sums: Tensor
    """Of what each rank measured."""
    steps_behind: int = 0
    """So many steps ago it was: an asynchronous worker has only heard of those."""
    staleness: int | None = None
    """Updates that the oldest weights behind this gradient lacked (asynchronous servers)."""


class Strategy:
    """A model on this rank, and what this rank's optimizers train of it.

    A step is: forward and backward passes of a sum of losses inside `backward`, then `reduce`, then `update` (or
    `drop_gradients`). As it stands here it is one process, the reference that every layout must equal.
    """

    runs_model = True
    """Whether this rank does forward and backward passes."""

    has_loss = True
    """Whether what this rank computes ends in a loss: of a pipeline only the rank with the last stage does."""

    loss_scale = 1.0
    """What the loss is multiplied by, so that gradients come out summed over ranks."""
    autocast = True
    """bf16 computes by autocast over fp32 parameters. False where the parameters that compute are bf16 themselves."""

    router_count_multiplicity = 1
    """How often routers count each choice of an expert, over all ranks and passes of a step."""

    pipeline_wait: WaitTimer | None = None
    """Time in which this rank waited for the other stages of a pipeline."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        """`group` are the ranks that read different data for the same model."""
        self.module = module
        self.group = group
        self.model: nn.Module = module
        """What to call for a forward pass."""
        self.trainable_parameters: dict[str, nn.Parameter] = dict(named_parameters(module))
        """What this rank's optimizers train, under the names of a model to which no layout was applied: whole
        parameters, or this rank's part of them (DTensors)."""
        self.comm_wait = WaitTimer()
        self.shared: ModelShardingProtocol | None = None
        """How ranks share the model itself, where they do."""
        self.tensor: TensorParallelProtocol | None = None
        """The ranks that share matrix products, where there are such."""
        self.wait_timers: dict[str, WaitTimer] = {}
        """Other times in which this rank waited, of which a run keeps a record: by what for."""
        self.pop_expert_rows: Callable[[], int] | None = None
        """How many rows this rank's experts computed since it was last asked, where ranks have different ones."""
        self.clock: DeviceClock = HOST_CLOCK
        self.loss_of_logits: Callable[[Tensor, Tensor, int], Tensor] = cross_entropy
        """Of whole logits."""
        self.timeline: list[tuple[ScheduleStep, Timestamp, Timestamp]] = []
        """What this rank did in the last step, and from when to when by its clock."""

    def forward_backward(
        self, micros: Sequence[MicroBatchProtocol], losses: LossFunction
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Forward and backward passes of a step's micro-batches; gives what `losses` gave of each, detached."""
        self.timeline = []
        for index, micro in enumerate(micros):
            start = self.clock.record()
            with self.backward(last=index == len(micros) - 1):
                loss, auxiliary = losses(self.model, micro)
                backward_start = self.clock.record()
                (self.loss_scale * (loss + auxiliary)).backward()
            end = self.clock.record()
            self.timeline += [
                (Action(0, "F", index), start, backward_start),
                (Action(0, "B", index), backward_start, end),
            ]
            yield loss.detach(), auxiliary.detach()

    def evaluate_micro_batch(self, micro: MicroBatchProtocol, losses: LossFunction) -> Tensor:
        """The loss of a micro-batch that nothing is learned from; 0 on a rank without the last stage."""
        return losses(self.model, micro)[0]

    def finish_weight_grad_pass(self) -> None:
        """After a backward pass that reached weights alone, as the second half of one does."""

    def end_rehearsal(self) -> None:
        """After backward passes that had only to load kernels, and left gradients of zero."""

    def finalize_gradients(self) -> None:
        """After a step's backward passes, of which none was said to be the last: bring the gradients to who trains."""

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Around the forward and backward pass of a micro-batch; `last` of its step."""
        yield

    def gradients(self) -> dict[str, Tensor]:
        """The summed gradient of what is trained, by name; whoever scales it scales the step."""
        return {name: p.grad for name, p in self.trainable_parameters.items() if p.grad is not None}

    def as_global_dtensor(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor like what is trained of `name`, as part of one like the whole model's (of the same memory)."""
        return tensor if self.shared is None else self.shared.as_global_dtensor(name, tensor)

    def reduce_partial_gradients(self) -> None:
        """Sum gradients of which several ranks that share the model have a term each. In the order of names, which is
        that of all ranks: with offload each has its gradients in an order of its own."""
        if self.shared is not None:
            terms: dict[tuple[dist.ProcessGroup, torch.dtype], list[Tensor]] = defaultdict(list)
            for name, gradient in sorted(self.gradients().items()):
                group = self.shared.gradient_reduce_group(name)
                if group is not None:
                    terms[group, gradient.dtype].append(local_tensor(gradient))
            for (group, _), partial_gradients in terms.items():
                start_all_reduce(partial_gradients, group, self.comm_wait)()

    def sync_scalars(self, sums: Tensor) -> None:
        """Ranks that share products measured the same, but for what only some were told: to stop."""
        if self.tensor is not None:
            self.tensor.all_reduce(sums, dist.ReduceOp.MAX)

    def grad_norm(self) -> Tensor:
        """Of the gradient of the whole model (a scalar)."""
        return global_grad_norm(
            [self.as_global_dtensor(name, gradient) for name, gradient in sorted(self.gradients().items())],
            self.comm_wait,
        )

    def cross_entropy(self, logits: Tensor, targets_BT: Tensor, ignored: int) -> Tensor:
        """The loss of the model's logits, [B, T, V] or this rank's part of them: summed over targets but `ignored`."""
        if self.tensor is not None:
            return self.tensor.cross_entropy(logits, targets_BT, ignored)
        return self.loss_of_logits(logits, targets_BT, ignored)

    def reduce(self, sums: Tensor, clip_norm: float = 0.0) -> StepReduction:
        """Sum over ranks what each measured (fp64), and turn the gradient of the summed losses into that of their mean
        over the first of these sums, of at most `clip_norm` (0: any).

        Nothing but sums is ever divided by ranks or micro-batches: their numbers of tokens may differ.
        """
        self.reduce_partial_gradients()
        norm = self.grad_norm()
        if self.group is not None:
            with self.comm_wait.measure():
                dist.all_reduce(sums, group=self.group)
        self.sync_scalars(sums)
        return StepReduction(self.normalize_and_clip(norm, sums[0], clip_norm), sums)

    def normalize_and_clip(self, norm: Tensor, weight: Tensor, clip_norm: float) -> Tensor:
        """Divide the gradients by `weight` and clip them; returns the norm (of the sum: `norm`) between the two."""
        norm = norm / weight.to(norm.dtype)
        scale_gradients(list(self.gradients().values()), clip_coefficient(norm, clip_norm) / weight.to(norm.dtype))
        return norm

    def step(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Step, let the model compute with the result, and drop the gradients."""
        for optimizer in optimizers:
            optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Forget the gradients of this step."""
        self.module.zero_grad()

    def sync_model_weights(self) -> None:
        """Let the model compute with what is trained, after somebody else than `update` changed that."""

    def drain_pending_updates(self) -> None:
        """Have every update that was made, so that all ranks compute with the same weights; before anything else than
        a step, and at the end (asynchronous updates may still be under way)."""

    def init_optimizer_state(self, parameter: nn.Parameter) -> Tensor:
        """Optimizer state of a trained parameter, not stepped yet: zeros like it, where such state rests."""
        return torch.zeros_like(parameter)

    def resident_tensors(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, list[Tensor]]:
        """What this rank holds from step to step, by part, for whoever measures it."""
        return {
            "parameters": [*self.module.parameters(), *self.trainable_parameters.values()],
            "gradients": [p.grad for p in self.module.parameters() if p.grad is not None],
            "optimizer": optimizer_state_tensors(optimizers),
        }

    def resizable_buffers(self) -> list[Tensor]:
        """Buffers of communication whose storage is freed and made again behind tensors that stay."""
        return []

    def reshard_parameters(self) -> None:
        """After forward passes that no backward pass follows: give back what was gathered for them."""


class ModelShardingProtocol(Protocol):
    """Which shares ranks have in a model (tensor and expert parallelism)."""

    shapes: dict[str, torch.Size]
    """Of whole parameters."""

    def expert_shard(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's shard of an expert that it has; `full` is the whole expert."""

    def as_global_dtensor(self, name: str, tensor: Tensor) -> Tensor:
        """See Strategy.part."""

    def local_shape(self, name: str, global_shape: torch.Size) -> torch.Size:
        """Return the shape of this rank's share of the parameter `name`, which has the shape `global_shape`."""

    def largest_shape(self, name: str) -> torch.Size:
        """Return the shape of the largest share that a rank has of the parameter `name`."""

    def gradient_reduce_group(self, name: str) -> dist.ProcessGroup | None:
        """The ranks that each have a term of this parameter's gradient, unless somebody else sums them."""


class TensorParallelProtocol(Protocol):
    """Ranks that share matrix products (tensor parallelism)."""

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """All-reduced in place."""

    def cross_entropy(self, logits_BTV: Tensor, targets_BT: Tensor, ignored: int) -> Tensor:
        """See Strategy.cross_entropy."""

    def residual_shape(self, tokens: torch.Size) -> tuple[int, ...]:
        """The shape of a rank's residual stream, but for its width, where a micro-batch has the shape `tokens`."""


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor, ignored: int) -> Tensor:
    """Negative log-likelihood of the targets in nats, summed; at least in fp32."""
    logits = logits_BTV.flatten(0, 1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, targets_BT.flatten(), ignore_index=ignored, reduction="sum")
