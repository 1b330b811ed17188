"""A learner on one rank: the model under its layout, its optimizers, and one step of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from phalanx.cost.exact.parameters import count_parameters
from phalanx.data.packing import IGNORE_INDEX, Batch, document_bounds, tokens_ahead
from phalanx.model.init import DrawnWeights
from phalanx.model.moe import Router
from phalanx.model.sequence_context import Documents
from phalanx.model.transformer import Ahead, Transformer, cap_logits
from phalanx.parallel.apply import apply_layout, apply_layout_to_network, autocast_context
from phalanx.parallel.comm.device_clock import DeviceClock
from phalanx.parallel.context_parallel import local_token_indices
from phalanx.parallel.expert.partial_experts import TrainedExperts
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.strategy import StepReduction, Strategy
from phalanx.program.pipeline_split import layers_per_stage
from phalanx.spec.batch import plan_batch
from phalanx.spec.layers import expert_layers
from phalanx.spec.run import RunSpec
from phalanx.train.components import build_loss, build_network
from phalanx.train.expert_counts import ExpertCounts
from phalanx.train.optim.optimizers import build_optimizers, set_learning_rate
from phalanx.train.step_sums import StepSums


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of this rank: tokens and targets of each row, and the documents of the full rows.

    `documents` None means one document per row."""

    tokens: Tensor
    targets: Tensor
    documents: Documents | None
    tokens_ahead: Tensor | None = None
    """Tokens that the layers for multi-token prediction read (`data.packing.tokens_ahead`), [layers, B, T]."""
    targets_ahead: Tensor | None = None
    """Their targets, [layers, B, T]."""
    mtp_losses: list[Tensor] = field(default_factory=list, init=False)
    """Their losses, summed over tokens, once they have run. Copies of a micro-batch have none."""

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Arguments of the model."""
        return (self.tokens,) if self.documents is None else (self.tokens, self.documents)


class Learner:
    """A model under the layout of a run on this rank, and its optimizers.

    It does not read tensor values, so that a step can be traced without values (`phalanx.verify`)."""

    def __init__(
        self,
        run: RunSpec,
        mesh: Mesh,
        device: torch.device,
        weights: Callable[[str, torch.Size], Tensor] | None = None,
        trained_experts: TrainedExperts | None = None,
    ) -> None:
        """Build the model and its optimizers.

        Initial `weights` are given by name, or drawn at random; without `trained_experts`, all experts are trained."""
        self.run = run
        self.mesh = mesh
        self.device = device
        self.compiles = run.on_device(device.type).compiles
        """True if blocks are compiled."""
        self.batch = plan_batch(run, mesh.dims.dp_size)
        self.num_parameters = count_parameters(run.model).total
        """Number of parameters of the full model."""
        self.strategy = self._build_strategy(weights, trained_experts)
        self.strategy.clock = DeviceClock(device)
        self.module = self.strategy.module
        self.loss = build_loss(run.training)
        """The user's loss of logits [B, T, V], targets [B, T] and the target to ignore, summed; None: cross-entropy."""
        self.after_passes: list[Callable[[], None]] = []
        """Called after the passes of each step, such as by a profiler."""
        self.after_reduction: list[Callable[[], None]] = []
        """Called after the reduction of each step, before the update."""
        moe = run.model.moe
        moe_layers = list(expert_layers(run.model))
        self.experts = ExpertCounts(moe_layers, moe.num_experts if moe else 0, device)
        routers = {name: submodule for name, submodule in self.module.named_modules() if isinstance(submodule, Router)}
        self.routers = {moe_layers.index(int(name.split(".")[1])): router for name, router in routers.items()}
        """This rank's routers, by their index among the layers with experts."""
        part_of_full = self.strategy.model_parallel.as_global_dtensor
        self.optimizers = build_optimizers(run.optimizer, self.strategy.trainable_parameters, part_of_full)

    def _build_strategy(
        self, weights: Callable[[str, torch.Size], Tensor] | None, trained_experts: TrainedExperts | None
    ) -> Strategy:
        """Build the model under the layout: Phalanx's transformer, or the user's network."""
        run = self.run
        training = run.training
        placement = self.mesh, self.device
        if run.model.implementation is not None:
            network = build_network(run, run.model.implementation)
            # Dropout must differ between data-parallel ranks.
            torch.manual_seed(training.seed + 1 + self.mesh.dp_rank)
            self.num_parameters = sum(parameter.numel() for parameter in network.parameters())
            return apply_layout_to_network(network, run.layout, *placement, training.precision, self.compiles)
        weights = weights or DrawnWeights(run.model, training.seed)
        layers = layers_per_stage(run) if run.layout.pp > 1 else ()
        return apply_layout(
            run.model, run.layout, *placement, weights, training.precision, self.compiles, layers, trained_experts
        )

    def local_tokens(self, tokens: int) -> Any:
        """Return the slice or indices of this rank's tokens in a sequence."""
        context = self.mesh.cp_mesh
        layout = self.run.layout
        if context is None:
            return slice(None)
        return local_token_indices(tokens, layout.cp, context.get_local_rank(), layout.cp_method).numpy()

    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """Return this rank's rows of a step as micro-batches on the device."""
        local_indices = self.local_tokens(batch.tokens.shape[1])
        # Rows of one document are treated like others, so that compiled blocks have one graph.
        mtp = self.run.model.mtp
        all_ahead = tokens_ahead(batch, mtp.layers) if mtp else ()
        always_has_documents = self.compiles and self.run.data.mask_documents and self.device.type == "cuda"
        micros = []
        for start in range(0, len(batch.tokens), self.batch.micro_batch_size):
            rows = slice(start, start + self.batch.micro_batch_size)
            document_starts = None if batch.document_starts is None else batch.document_starts[rows]
            if document_starts is None or not document_starts.any():
                document_starts = np.zeros_like(batch.tokens[rows], np.int32) if always_has_documents else None
            documents = None
            if document_starts is not None:
                host_bounds = document_bounds(document_starts)
                documents = Documents(
                    self._to_device(document_starts), self._to_device(host_bounds), host_bounds.tolist()
                )
                # The number of documents is dynamic, so that blocks are compiled only once.
                if self.compiles:
                    torch._dynamo.maybe_mark_dynamic(documents.bounds, 0)
            tokens, targets = (self._to_device(x[rows][:, local_indices]) for x in (batch.tokens, batch.targets))
            ahead = (self._to_device(x[:, rows][..., local_indices]) for x in all_ahead)
            micros.append(MicroBatch(tokens, targets, documents, *ahead))
        return micros

    def _to_device(self, array: Any) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def forward_backward(self, micros: Sequence[MicroBatch]) -> StepSums:
        """Compute the gradients of the summed loss of this rank's rows, and return the values that ranks must sum."""
        sums = StepSums.zeros(self.experts.load_shape, self.device)
        mtp = self.run.model.mtp
        for micro, (loss, auxiliary) in zip(
            micros, self.strategy.forward_backward(micros, self.compute_losses), strict=True
        ):
            sums.tokens.add_((micro.targets != IGNORE_INDEX).sum() * self.strategy.has_loss)
            sums.loss.add_(loss)
            sums.auxiliary_loss.add_(auxiliary)
            if mtp and micro.mtp_losses:
                mtp_loss = torch.stack(micro.mtp_losses).mean()
                sums.mtp_loss.add_(mtp_loss)
                sums.auxiliary_loss.sub_(mtp.loss_coef * mtp_loss)
        for moe_index, router in self.routers.items():
            sums.expert_loads[moe_index] = router.load / router.forward_passes
            sums.dropped_choices.add_(router.dropped / router.forward_passes)
        return sums

    def compute_losses(self, model: Callable[..., Any], micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the loss and the auxiliary loss, summed over tokens.

        Logits, the largest tensor of all, are freed here."""
        mtp = self.run.model.mtp
        ahead = None
        if mtp is not None:
            assert micro.tokens_ahead is not None
            assert micro.targets_ahead is not None
            weight = mtp.loss_coef / mtp.layers
            losses = [partial(self._mtp_loss, micro, targets, weight) for targets in micro.targets_ahead]
            ahead = Ahead(micro.tokens_ahead, losses)
        if self.loss is None:
            return self.compute_held_out_loss(model, micro, ahead)
        logits, auxiliary = self._run_model(model, micro, ahead=ahead)
        return self.loss(logits, micro.targets, IGNORE_INDEX), auxiliary

    def compute_held_out_loss(
        self, model: Callable[..., Any], micro: MicroBatch, ahead: Ahead | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy and the auxiliary loss, summed over tokens, even if training uses another loss."""
        data_parallel = self.strategy.data_parallel
        head = data_parallel.head_loss(micro.targets, IGNORE_INDEX)
        if head is not None:
            return self._run_model(model, micro, head=head, ahead=ahead)
        logits, auxiliary = self._run_model(model, micro, head=data_parallel.uncapped_logits, ahead=ahead)
        return data_parallel.cross_entropy(logits, micro.targets, IGNORE_INDEX), auxiliary

    def _mtp_loss(self, micro: MicroBatch, targets: Tensor, weight: float, x_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        """Return the weighted loss of a layer for multi-token prediction, whose output is the head's input."""
        data_parallel = self.strategy.data_parallel
        head = None if self.loss else data_parallel.head_loss(targets, IGNORE_INDEX)
        if head is not None:
            loss = head(x_BTD, weight_VD)
        else:
            logits = cast(Transformer, self.module).logits(x_BTD, weight_VD)
            with torch.autocast(self.device.type, enabled=False):
                if self.loss is None:
                    loss = data_parallel.cross_entropy(logits, targets, IGNORE_INDEX)
                else:
                    loss = self.loss(cap_logits(logits, self.run.model.logits_softcap), targets, IGNORE_INDEX)
        micro.mtp_losses.append(loss.detach())
        return weight * loss

    def _run_model(self, model: Callable[..., Any], micro: MicroBatch, **options: Any) -> tuple[Tensor, Tensor]:
        """Return the logits and the auxiliary loss; a network of the user may return the logits alone."""
        options = {name: value for name, value in options.items() if value is not None}
        with autocast_context(self.strategy, self.run.training.precision, self.device):
            output = model(*micro.inputs, **options)
        return output if isinstance(output, tuple) else (output, output.new_zeros(()))

    def reduce(self, sums: StepSums) -> StepReduction:
        """Sum values and gradients over ranks, and clip the gradients."""
        for observe in self.after_passes:
            observe()
        reduced = self.strategy.reduce(sums.packed, self.run.optimizer.max_grad_norm)
        for observe in self.after_reduction:
            observe()
        return reduced

    def update(self, ratio: float) -> None:
        """Step the optimizers, at the peak learning rates times `ratio`."""
        set_learning_rate(self.optimizers, ratio)
        self.strategy.update(self.optimizers)
