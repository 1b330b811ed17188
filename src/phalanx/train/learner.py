"""A learner on one rank: the model under its layout, its optimizers, and one step of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from phalanx.cost.exact.parameters import count_parameters
from phalanx.data.loader import rank_rows
from phalanx.data.packing import IGNORE_INDEX, Batch, document_bounds, tokens_ahead, weights_ahead
from phalanx.data.preference_pairs import NO_ANSWER
from phalanx.model.dropout import dropping, token_keys
from phalanx.model.init import DrawnWeights, Weights
from phalanx.model.moe import Router
from phalanx.model.sequence_context import Documents
from phalanx.model.transformer import Ahead, Transformer, cap_logits
from phalanx.parallel.apply import apply_layout, apply_layout_to_network, autocast_context
from phalanx.parallel.comm.device_clock import DeviceClock
from phalanx.parallel.context_parallel import local_token_indices
from phalanx.parallel.cross_entropy import LossTerms
from phalanx.parallel.distillation_loss import TeacherHead
from phalanx.parallel.expert.partial_experts import TrainedExperts
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.strategy import StepReduction, Strategy
from phalanx.parallel.summed_over_ranks import sum_over_ranks
from phalanx.program.pipeline_split import layers_per_stage
from phalanx.spec.batch import plan_batch
from phalanx.spec.files.teacher import teacher_run
from phalanx.spec.layers import expert_layers
from phalanx.spec.run import RunSpec
from phalanx.train.components import build_loss, build_network
from phalanx.train.expert_counts import ExpertCounts
from phalanx.train.optim.optimizers import build_optimizers, set_learning_rate
from phalanx.train.preference_loss import pair_losses
from phalanx.train.step_sums import StepSums
from phalanx.train.teacher import Teacher


@dataclass(frozen=True)
class MicroPairs:
    """The pairs of answers of a micro-batch. Pair p has the answers 2p, which is chosen, and 2p + 1."""

    answer_of_token: Tensor
    """Answer of each of this rank's tokens, int64 [B, T]; 2P for padding."""
    documents: Tensor
    """Document of each answer in its file, int64 [2P]."""
    num_targets: Tensor
    """Number of tokens of each answer, fp64 [P, 2]."""
    reference: Tensor
    """Log-probability of each answer by the reference, fp64 [P, 2]; 0 while that is computed."""
    loss_weight: float
    """Factor of losses, by which the sum over pairs counts as one over targets (`PreferencePairs.targets_per_pair`)."""
    results: list[Tensor] = field(default_factory=list, init=False)
    """This rank's share of the sums over pairs, fp64 [4], once they have been computed: their number, that of those
    whose chosen answer has the higher reward, the differences of rewards, and the losses."""


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
    weights_ahead: Tensor | None = None
    """The weights of these targets, [layers, B, T]; None: 1."""
    terms: LossTerms | None = None
    """Sources of the tokens in a mixture with the sums of their losses, and weights of the tokens."""
    pairs: MicroPairs | None = None
    """The pairs of answers, if the rows have preferences."""
    token_keys: Tensor | None = None
    """Keys of the tokens, [B, T], if inputs of adapters are dropped (`model.dropout`)."""
    mtp_losses: list[Tensor] = field(default_factory=list, init=False)
    """Their losses, summed over tokens, once they have run. Copies of a micro-batch have none."""
    taught: list[TeacherHead] = field(default_factory=list)
    """Output of the teacher, which in a pipeline is computed before the step."""
    divergences: list[Tensor] = field(default_factory=list, init=False)
    """Sums of KL(teacher || student), once they have been computed. Copies of a micro-batch have none."""

    @property
    def target_counts(self) -> Tensor:
        """How much each target counts in the mean, [B, T]: its weight, or 1, and 0 where there is none."""
        is_target = self.targets != IGNORE_INDEX
        weights = None if self.terms is None else self.terms.weight_of_token
        return is_target if weights is None else is_target * weights.view_as(is_target)

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
        teacher_weights: Weights | None = None,
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
        self.teacher = None
        """The frozen model of a run with distillation."""
        if run.distillation is not None and (taught_by := teacher_run(run)) is not None:
            self.teacher = Teacher(taught_by, run.distillation, mesh, device, self.compiles, teacher_weights)
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

    def resident_tensors(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, list[Tensor]]:
        """Return the tensors that this rank keeps between steps, by part."""
        resident = self.strategy.resident_tensors(optimizers)
        if self.teacher is not None:
            resident["teacher"] = self.teacher.strategy.resident_tensors(())["parameters"]
        return resident

    def local_tokens(self, tokens: int) -> Any:
        """Return the slice or indices of this rank's tokens in a sequence."""
        context = self.mesh.cp_mesh
        layout = self.run.layout
        if context is None:
            return slice(None)
        return local_token_indices(tokens, layout.cp, context.get_local_rank(), layout.cp_method).numpy()

    def micro_batches(
        self, batch: Batch, reference: np.ndarray | None = None, step: int | None = None
    ) -> list[MicroBatch]:
        """Return this rank's rows of a step as micro-batches on the device.

        `reference` has the log-probability of each document's answer, if the rows have preferences. Without the number
        of the `step` that they train, nothing is dropped."""
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
            ahead: list[Tensor | None] = [self._to_device(x[:, rows][..., local_indices]) for x in all_ahead]
            ahead = ahead or [None, None]
            weights = None if batch.weights is None else batch.weights[rows]
            of_ahead = None
            if weights is not None and mtp:
                of_ahead = self._to_device(weights_ahead(weights, mtp.layers)[..., local_indices])
            sources = None if batch.sources is None else batch.sources[rows]
            terms = self.loss_terms(sources, None if weights is None else weights[:, local_indices], tokens.shape[1])
            pairs = self._pairs_of_rows(batch, rows, reference)
            keys = None if step is None else self._token_keys(step, rows, batch.tokens.shape)
            micros.append(MicroBatch(tokens, targets, documents, ahead[0], ahead[1], of_ahead, terms, pairs, keys))
        return micros

    def _token_keys(self, step: int, rows: slice, shape: tuple[int, int]) -> Tensor | None:
        """Return the keys of this rank's tokens in some of its rows of a step, if inputs of adapters are dropped."""
        adapter = self.run.adapter
        if adapter is None or not adapter.dropout:
            return None
        own = rank_rows(self.batch.global_batch_size, self.mesh.dp_rank, self.mesh.dims.dp_size)
        positions = np.arange(shape[1])[self.local_tokens(shape[1])]
        return self._to_device(token_keys(self.run.training.seed, step, own[rows], positions))

    def _pairs_of_rows(self, batch: Batch, rows: slice, reference: np.ndarray | None) -> MicroPairs | None:
        """Return the pairs of some rows on the device; None if they have none."""
        if batch.pairs is None:
            return None
        pairs = batch.pairs.of_rows(rows)
        answers = np.where(pairs.answer_of_token == NO_ANSWER, len(pairs.documents), pairs.answer_of_token)
        num_targets = np.bincount(answers[batch.targets[rows] != IGNORE_INDEX], minlength=len(pairs.documents) + 1)
        log_probs = np.zeros(len(pairs.documents)) if reference is None else reference[pairs.documents]
        return MicroPairs(
            answer_of_token=self._to_device(answers[:, self.local_tokens(answers.shape[1])]),
            documents=self._to_device(pairs.documents),
            num_targets=self._to_device(num_targets[:-1].reshape(-1, 2).astype(np.float64)),
            reference=self._to_device(log_probs.reshape(-1, 2)),
            loss_weight=pairs.targets_per_pair,
        )

    def loss_terms(
        self, sources: np.ndarray | None, weights: np.ndarray | None, num_local_tokens: int
    ) -> LossTerms | None:
        """Return the terms of losses from the sources of rows, [B], and the weights of this rank's tokens, [B, T].

        None of both: None. Only the target tokens of this rank are counted. The user's loss is a sum, without terms."""
        if (sources is None and weights is None) or self.loss is not None:
            return None
        weight_of_token = None if weights is None else self._to_device(weights.flatten())
        if sources is None:
            return LossTerms(weight_of_token=weight_of_token)
        source_of_token = self._to_device(np.repeat(sources, num_local_tokens))
        sums = torch.zeros(len(self.run.data.source), dtype=torch.float64, device=self.device)
        return LossTerms(source_of_token, sums, weight_of_token)

    def _to_device(self, array: Any) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def forward_backward(self, micros: Sequence[MicroBatch]) -> StepSums:
        """Compute the gradients of the summed loss of this rank's rows, and return the values that ranks must sum."""
        sums = self.zero_sums()
        mtp = self.run.model.mtp
        if self.teacher is not None and self.run.layout.pp > 1:
            # Its pipeline cannot run within a pass of the other one.
            for micro in micros:
                micro.taught[:] = self.teacher.outputs(micro)
            self.teacher.end_passes()
        for micro, (loss, auxiliary) in zip(
            micros, self.strategy.forward_backward(micros, self.compute_losses), strict=True
        ):
            counts = micro.target_counts * self.strategy.has_loss
            sums.tokens.add_(counts.sum())
            terms = micro.terms
            if terms is not None and terms.group_of_token is not None and terms.sums is not None:
                sums.source_losses.add_(terms.sums)
                sums.source_targets.index_add_(0, terms.group_of_token, counts.flatten().double())
            sums.loss.add_(loss)
            sums.auxiliary_loss.add_(auxiliary)
            if micro.pairs is not None and micro.pairs.results:
                sums.preferences.add_(micro.pairs.results[0][:3])
            for divergence in micro.divergences:
                sums.divergences.add_(divergence)
            if mtp and micro.mtp_losses:
                mtp_loss = torch.stack(micro.mtp_losses).mean()
                sums.mtp_loss.add_(mtp_loss)
                sums.auxiliary_loss.sub_(mtp.loss_coef * mtp_loss)
        if self.teacher is not None:
            self.teacher.end_step()
        for moe_index, router in self.routers.items():
            sums.expert_loads[moe_index] = router.load / router.forward_passes
            sums.dropped_choices.add_(router.dropped / router.forward_passes)
        return sums

    def zero_sums(self) -> StepSums:
        """Return the sums of a step before its passes."""
        return StepSums.zeros(self.run, self.experts.load_shape, self.device)

    def unpack_sums(self, packed: Tensor) -> StepSums:
        """Name the values of a step's sums."""
        return StepSums.unpack(packed, self.run, self.experts.load_shape)

    def compute_losses(self, model: Callable[..., Any], micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the loss and the auxiliary loss, summed over tokens.

        Logits, the largest tensor of all, are freed here."""
        if micro.pairs is not None:
            return self.compute_preference_loss(model, micro, micro.pairs)
        if self.teacher is not None:
            return self.compute_distillation_loss(model, micro, self.teacher)
        mtp = self.run.model.mtp
        ahead = None
        if mtp is not None:
            assert micro.tokens_ahead is not None
            assert micro.targets_ahead is not None
            weights = [None] * mtp.layers if micro.weights_ahead is None else micro.weights_ahead
            terms = [None if weight is None else LossTerms(weight_of_token=weight.flatten()) for weight in weights]
            targets_and_terms = zip(micro.targets_ahead, terms, strict=True)
            losses = [partial(self._mtp_loss, micro, *both, mtp.loss_coef / mtp.layers) for both in targets_and_terms]
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
        head = data_parallel.head_loss(micro.targets, IGNORE_INDEX, micro.terms)
        if head is not None:
            return self._run_model(model, micro, head=head, ahead=ahead)
        logits, auxiliary = self._run_model(model, micro, head=data_parallel.uncapped_logits, ahead=ahead)
        return data_parallel.cross_entropy(logits, micro.targets, IGNORE_INDEX, micro.terms), auxiliary

    def compute_distillation_loss(
        self, model: Callable[..., Any], micro: MicroBatch, teacher: Teacher
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of distillation and the auxiliary loss, summed over tokens; add to `micro.divergences`."""
        (taught,) = micro.taught or teacher.outputs(micro)
        taught = replace(taught, divergences=[])  # a rehearsal of a pipeline has added to the list before
        head = self.strategy.data_parallel.head_loss(micro.targets, IGNORE_INDEX, micro.terms, taught)
        losses = self._run_model(model, micro, head=head)
        micro.divergences.extend(taught.divergences)
        return losses

    def compute_preference_loss(
        self, model: Callable[..., Any], micro: MicroBatch, pairs: MicroPairs
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of pairs, weighted as a sum over targets, and the auxiliary loss; add to `pairs.results`.

        Ranks that share sequences each have an equal share of the loss, whose sums over answers need the tokens of all.
        """
        assert self.run.preference is not None
        sums, auxiliary = self.answer_log_probs(model, micro)
        ranks = 1
        if self.mesh.cp_mesh is not None:
            ranks = self.mesh.cp_mesh.size()
            sums = sum_over_ranks(sums, self.mesh.cp_mesh.get_group(), self.strategy.comm_wait)
        losses, margins = pair_losses(self.run.preference, sums.view(-1, 2), pairs.reference, pairs.num_targets)
        loss = losses.sum() / ranks
        count = torch.full_like(loss, len(losses) / ranks)
        pairs.results.append(
            torch.stack([count, (margins > 0).sum() / ranks, margins.sum() / ranks, loss]).double().detach()
        )
        return (pairs.loss_weight * loss).to(auxiliary.dtype), auxiliary

    def answer_log_probs(self, model: Callable[..., Any], micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the log-probability of this rank's targets of each answer, fp64 [2P], and the auxiliary loss."""
        assert micro.pairs is not None
        data_parallel = self.strategy.data_parallel
        head = data_parallel.head_token_losses(micro.targets, IGNORE_INDEX)
        if head is not None:
            losses_BT, auxiliary = self._run_model(model, micro, head=head)
        else:
            logits, auxiliary = self._run_model(model, micro, head=data_parallel.uncapped_logits)
            losses_BT = data_parallel.token_losses(logits, micro.targets, IGNORE_INDEX)
        num_answers = len(micro.pairs.documents)
        sums = losses_BT.new_zeros(num_answers + 1, dtype=torch.float64)
        sums = sums.index_add(0, micro.pairs.answer_of_token.flatten(), losses_BT.flatten().double())
        return -sums[:num_answers], auxiliary

    def _mtp_loss(
        self,
        micro: MicroBatch,
        targets: Tensor,
        terms: LossTerms | None,
        weight: float,
        x_BTD: Tensor,
        weight_VD: Tensor,
    ) -> Tensor:
        """Return the weighted loss of a layer for multi-token prediction, whose output is the head's input."""
        data_parallel = self.strategy.data_parallel
        head = None if self.loss else data_parallel.head_loss(targets, IGNORE_INDEX, terms)
        if head is not None:
            loss = head(x_BTD, weight_VD)
        else:
            logits = cast(Transformer, self.module).logits(x_BTD, weight_VD)
            with torch.autocast(self.device.type, enabled=False):
                if self.loss is None:
                    loss = data_parallel.cross_entropy(logits, targets, IGNORE_INDEX, terms)
                else:
                    loss = self.loss(cap_logits(logits, self.run.model.logits_softcap), targets, IGNORE_INDEX)
        micro.mtp_losses.append(loss.detach())
        return weight * loss

    def _run_model(self, model: Callable[..., Any], micro: MicroBatch, **options: Any) -> tuple[Tensor, Tensor]:
        """Return the logits and the auxiliary loss; a network of the user may return the logits alone."""
        options = {name: value for name, value in options.items() if value is not None}
        with autocast_context(self.strategy, self.run.training.precision, self.device), dropping(micro.token_keys):
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
