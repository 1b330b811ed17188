"""Pipeline parallelism: ranks have stages of the model's blocks and run a `Schedule` of micro-batches.

Activations of a step's micro-batches pass through all stages, and their gradients back. The same `Schedule` is
simulated and drawn.

A rank sends the output of a stage, an activation or a gradient, as soon as it is ready, without blocking. It waits only
for the input of its next action. Where a schedule has half actions, backward passes are split (`split_backward`).
Gradients accumulate over the step, and data-parallel ranks sum them once, at its end.

Why: `docs/design/decisions/own-pipeline-runtime.md`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.model.part import modules_declaring
from phalanx.model.sequence_context import Documents
from phalanx.model.transformer import HeadFunction
from phalanx.parallel.comm.device_clock import HOST_CLOCK
from phalanx.parallel.comm.wait_timer import WaitTimer
from phalanx.parallel.cross_entropy import LossScale
from phalanx.parallel.pipeline.p2p import PipelineP2P, connect_peers
from phalanx.parallel.pipeline.shared_embedding import SharedEmbedding
from phalanx.parallel.pipeline.split_backward import split_backward
from phalanx.parallel.pipeline.stage_module import InferenceMicroBatch, StageModule
from phalanx.parallel.pipeline.stage_passes import PipelineStepState, StagePasses
from phalanx.parallel.protocols import LossFunction, MicroBatchProtocol
from phalanx.parallel.strategy import StepReduction, Strategy
from phalanx.schedule.schedule import Action, ActionKind, Schedule, actions
from phalanx.spec.parts.operations import Route

LAZY_LOADING_DEVICES = ("cuda",)


class PipelineStrategy(Strategy):
    """A rank's pipeline stages, combined with their data-parallel strategy."""

    def __init__(
        self,
        data_parallel: Strategy,
        stage_module: StageModule,
        representative: Schedule,
        make_schedule: Callable[[int], Schedule],
        p2p_groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        loss_group: dist.ProcessGroup,
        forward_context: Callable[[], AbstractContextManager[object]],
        activation_template: Tensor,
        cp_size: int = 1,
    ) -> None:
        """Create the pipeline of this rank's stages.

        `data_parallel` is already connected to the groups that share the model. `representative` is a schedule of this
        pipeline for any number of micro-batches. The two `p2p_groups` carry messages to later and to earlier ranks.
        `loss_group` contains the ranks of the pipeline and their data-parallel replicas. `activation_template` is a
        tensor of the dtype and device of the activations that stages send. `cp_size` ranks share the tokens of a
        row."""
        # `super().__init__` is not called: the loss of logits, for example, belongs to `data_parallel`, and has no
        # default here.
        self.module = data_parallel.module
        self.group = loss_group
        self.trainable_parameters = data_parallel.trainable_parameters
        self.frozen_parameters = data_parallel.frozen_parameters
        self.comm_wait = data_parallel.comm_wait
        self.model_parallel = data_parallel.model_parallel
        self.clock = HOST_CLOCK
        self.timeline = []
        self.stages = stage_module
        self.schedule_of = make_schedule
        self.passes = StagePasses(data_parallel, stage_module, forward_context)
        self.p2p_groups = p2p_groups
        self.pipe = p2p_groups[0]
        self.activation_template = activation_template
        self.pipeline_wait: WaitTimer = WaitTimer()
        self.rank = self.pipe.rank()
        self.has_loss = stage_module.last in stage_module.layers
        self.model = stage_module
        stages = map(representative.stages_of, range(representative.ranks))
        self.forward_only = Schedule.from_rows(
            [[Action(stage, "F", 0) for stage in rank_stages] for rank_stages in stages]
        )
        self.shared_embedding = SharedEmbedding(stage_module, data_parallel, self.forward_only.end_ranks, p2p_groups)
        self.shared_embedding.create_copy(activation_template)
        self.splits_backward = representative.splits_backward
        self.cp_size = cp_size
        self._loaded_cases: set[tuple[object, ...]] = set()
        if activation_template.device.type != "cpu":
            connect_peers(representative, self.rank, p2p_groups, token=activation_template.new_zeros(1))
        if any(action.kind == "W" for action in representative.actions(self.rank)):
            split_backward(stage_module, stage_module.deferred_weight_grads)

    @property
    def data_parallel(self) -> Strategy:
        """The strategy of this rank's stages."""
        return self.passes.data_parallel

    # -- a step ------------------------------------------------------------------------------------------------------

    def forward_backward(
        self, micros: Sequence[MicroBatchProtocol], losses: LossFunction
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Run the full schedule, and return the loss and auxiliary loss of each micro-batch.

        The loss is 0 on ranks without the last stage; the auxiliary loss is that of this rank's stages."""
        schedule = self.schedule_of(len(micros))
        state = PipelineStepState(micros=micros, losses=losses)
        self.timeline = []
        # Discard the waits of an evaluation.
        self.pipeline_wait.pop_seconds()
        with self.data_parallel.accumulate(last=False):
            self._load_kernels(micros, losses)
            links = self._post_first_receives(schedule, micros)
            for step in schedule.orders[self.rank]:
                inputs = [self._receive_input(schedule, links, action) for action in actions(step)]
                start = self.clock.record()
                for action, received in zip(actions(step), inputs, strict=True):
                    output = self.passes.execute(action, received, state)
                    message = schedule.output_message(action)
                    if message is not None and output is not None:
                        links.send(message, output)
                self.timeline.append((step, start, self.clock.record()))
            links.finish()
        sums = [torch.stack(state.losses_by_micro_batch[index]).sum(0) for index in range(len(micros))]
        return iter([(loss, auxiliary) for loss, auxiliary in sums])

    def evaluate_micro_batch(self, micro: MicroBatchProtocol, losses: LossFunction) -> Tensor:
        """Return the loss of a micro-batch without a backward pass; 0 without the last stage."""
        schedule = self.forward_only
        loss = self.activation_template.new_zeros((), dtype=torch.float32)
        self._load_kernels([micro], losses)
        links = self._post_first_receives(schedule, [micro])
        for action in schedule.actions(self.rank):
            received = self._receive_input(schedule, links, action)
            x = micro.tokens if received is None else received
            out = self.passes.forward(action.stage, x, micro, losses=losses).output
            if action.stage < self.stages.last:
                links.send(action, out)
            else:
                loss = out
        links.finish()
        return loss

    def run_head(self, tokens_BT: Tensor, head: HeadFunction | None) -> Tensor | None:
        """Run the stages one after the other; see `Strategy.run_head`.

        An input is received when it is needed, so that the load of a kernel waits for earlier stages only
        (`_load_kernels`). A rehearsal would add tokens to the cache of generation."""
        micro = InferenceMicroBatch(tokens_BT, documents=None)
        (shape,) = self._activation_shapes([micro])
        schedule = self.forward_only
        out = tokens_BT
        for action in schedule.actions(self.rank):
            sender = schedule.rank_of[action.stage - 1] if action.stage else self.rank
            if sender != self.rank:
                out = self.activation_template.new_empty(shape)
                dist.recv(out, group=self.p2p_groups[sender > self.rank], group_src=sender)
            out = self.passes.forward(action.stage, out, micro, lambda model, _: model(tokens_BT, head=head)).output
            receiver = schedule.receiver(action) if action.stage < self.stages.last else self.rank
            if receiver != self.rank:
                dist.send(out.contiguous(), group=self.p2p_groups[receiver < self.rank], group_dst=receiver)
        return out if self.has_loss else None

    def send_from_head(self, tensor: Tensor) -> Tensor:
        """Broadcast from the rank with the last stage, in place."""
        tensor = tensor.contiguous()
        dist.broadcast(tensor, group=self.pipe, group_src=self.forward_only.rank_of[self.stages.last])
        return tensor

    def holds_in_all_stages(self, condition: bool) -> bool:
        """Return whether a condition holds on all ranks."""
        held = torch.tensor(int(condition), device=next(self.module.parameters()).device)
        dist.all_reduce(held, dist.ReduceOp.MIN, group=self.pipe)
        return bool(held)

    def _receive_input(self, schedule: Schedule, links: PipelineP2P, action: Action) -> Tensor | None:
        """Receive an action's input from another stage; None if the action needs none."""
        needed = schedule.input_message(action)
        return None if needed is None else links.receive(needed)

    def _load_kernels(self, micros: Sequence[MicroBatchProtocol], losses: LossFunction) -> None:
        """Compute this rank's stages once for each new shape of micro-batches, before any message.

        CUDA loads a kernel at its first launch, and the host then waits for all pending work of the GPU ("Lazy
        Loading", CUDA C++ Programming Guide). A receive whose message depends on that kernel would deadlock, as
        observed on an H100. Rehearsals also communicate, for example the tokens of experts, so they must not depend on
        what only one rank knows, such as the documents of its rows."""
        if self.activation_template.device.type not in LAZY_LOADING_DEVICES:
            return
        shapes = self._activation_shapes(micros)
        case = (*shapes, torch.is_grad_enabled())
        if case in self._loaded_cases:
            return
        self._loaded_cases.add(case)
        # Gradients of the rehearsal are zero.
        self.passes.backward_scale = LossScale(0.0)
        # Only the last micro-batch may be smaller than the first.
        for index in sorted({0, len(micros) - 1}):
            micro: Any = micros[index]
            rows, tokens = micro.tokens.shape
            # Kernels of a ring depend on the lengths of documents.
            sizes = rows, tokens * self.cp_size, micro.tokens.device
            for documents in (None, Documents.whole_rows(*sizes), Documents.single_tokens_first(*sizes)):
                self._rehearse_stages(replace(micro, documents=documents), shapes[index], losses)
        self.passes.backward_scale = self.data_parallel.backward_scale
        self.data_parallel.end_rehearsal()
        # Free the memory of a rehearsal: its tensors, such as sums of gradients, have other sizes than those of a step.
        torch.cuda.empty_cache()

    def _rehearse_stages(self, micro: MicroBatchProtocol, shape: torch.Size, losses: LossFunction) -> None:
        """Compute this rank's stages on synthetic activations of this shape.

        All forward passes precede all backward passes. (At the end of any backward pass FSDP2 visits all stages, which
        must have been gathered before.)"""
        template = self.activation_template
        activation = torch.arange(shape.numel(), device=template.device).sin().view(shape).to(template.dtype)
        if not torch.is_grad_enabled():
            for stage in self.stages.layers:
                self.passes.forward(stage, micro.tokens if stage == 0 else activation, micro, losses=losses)
            return
        state = PipelineStepState(micros=[micro], losses=losses)
        # The second pass accumulates gradients, which is a separate kernel.
        for _ in range(2):
            self._rehearse_step(activation, state)
        # Drop the numbers of tokens that the rehearsal has counted.
        for router in modules_declaring(self.stages, Route):
            router.load.zero_()
            router.dropped.zero_()
        if self.model_parallel.pop_expert_rows is not None:
            self.model_parallel.pop_expert_rows()

    def _rehearse_step(self, activation: Tensor, state: PipelineStepState) -> None:
        """Run the forward and backward passes of this rank's stages."""
        for stage in self.stages.layers:
            self.passes.execute(Action(stage, "F", 0), activation.detach() if stage else None, state)
        halves: tuple[ActionKind, ...] = ("I", "W") if self.splits_backward else ("B",)
        for stage, kind in product(self.stages.layers, halves):
            gradient = torch.zeros_like(activation) if stage < self.stages.last else None
            self.passes.execute(Action(stage, kind, 0), gradient, state)

    def _activation_shapes(self, micros: Sequence[MicroBatchProtocol]) -> list[torch.Size]:
        """Return the shape of each micro-batch's activation between stages."""
        tensor_parallel = self.model_parallel.tensor_parallel
        shape_of: Callable[[torch.Size], Sequence[int]] = tensor_parallel.residual_shape if tensor_parallel else tuple
        return [torch.Size([*shape_of(micro.tokens.shape), self.stages.spec.hidden_size]) for micro in micros]

    def _post_first_receives(self, schedule: Schedule, micros: Sequence[MicroBatchProtocol]) -> PipelineP2P:
        """Create the message queues of a schedule, whose first receives are posted at once."""
        shapes = self._activation_shapes(micros)
        return PipelineP2P(schedule, self.rank, self.p2p_groups, shapes, self.activation_template, self.pipeline_wait)

    # -- the interface of every strategy -------------------------------------------------------------------------------

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the data-parallel strategy."""
        return self.data_parallel.gradients()

    def reduce(self, sums: Tensor, clip_norm: float = 0.0) -> StepReduction:
        """Reduce as `Strategy.reduce`, with the gradient norm of all stages."""
        self.shared_embedding.reduce_gradient()
        self.data_parallel.finalize_gradients()
        self.data_parallel.reduce_partial_gradients()
        square = self.grad_norm().to(sums.device).square()
        with self.comm_wait.measure():
            dist.all_reduce(square, group=self.pipe)
            dist.all_reduce(sums, group=self.group)
        self.model_parallel.sync_scalars(sums)
        return StepReduction(norm=self.data_parallel.normalize_and_clip(square.sqrt(), sums[0], clip_norm), sums=sums)

    def update(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Step the optimizers, and copy a shared embedding to the last stage."""
        self.data_parallel.update(optimizers)
        if self.shared_embedding.is_trained:
            self.shared_embedding.send_weight()

    def zero_grad(self) -> None:
        """Drop the gradients of this step."""
        self.data_parallel.zero_grad()

    def wait_for_weights(self) -> None:
        """Finish the last update of the data-parallel strategy."""
        self.data_parallel.wait_for_weights()

    def sync_model_weights(self) -> None:
        """Copy the trained weights to the model, and a shared embedding to the last stage."""
        self.data_parallel.sync_model_weights()
        self.shared_embedding.send_weight()

    def init_optimizer_state(self, parameter: nn.Parameter) -> Tensor:
        """Return initial optimizer state of a parameter."""
        return self.data_parallel.init_optimizer_state(parameter)

    def resident_tensors(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, list[Tensor]]:
        """Return the persistent tensors of this rank by part, with the copy of a shared embedding."""
        resident = self.data_parallel.resident_tensors(optimizers)
        if self.shared_embedding.copy is not None:
            resident["parameters"] = [*resident["parameters"], self.shared_embedding.copy]
        return resident
