"""What the forward pass of one micro-batch leaves in memory for its backward pass. Exact, and without torch.

The method is that of Korthikanti et al. (arXiv 2205.05198, section 4): go through the operations, and count what each
keeps to compute its gradient. Their sum for a layer, T B D (34 + 5 H T / D) bytes, is of GPT in 16 bits with dropout.
Ours differs: flash attention (arXiv 2205.14135) keeps a row's logsumexp instead of T x T scores and their softmax,
there is no dropout, SwiGLU keeps four inner tensors where GELU keeps two, and autocast keeps a bf16 copy of a linear
layer's input for each layer that reads it.

The counts are those of PyTorch's CPU kernels, uncompiled, and tested against them to the byte; or those of its CUDA
kernels (`on_cuda`), which differ in norms and in what they need of documents. Not counted: key/value heads that the
model repeats on CUDA where a mask is needed, in fp32 (`model/attention.py`).
Of what exists for a moment only, the loss's is counted (N V numbers each, usually the largest), and what is computed
again; gradients on their way between layers are not.

Symbols: B sequences, T tokens in each, N = B T, D width, H heads, K head width, F inner width, V vocabulary, E experts,
k of them per token; q and kv are the widths of all query and of all key/value heads together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.cost.exact.saved_tensors import (
    ForwardShape,
    deferred_head_grad_bytes,
    deferred_weight_grad_bytes,
    mlp_backward_bytes,
    saved_by_attention,
    saved_by_experts,
    saved_by_head,
    saved_by_inputs,
    saved_by_mlp,
    saved_by_norm,
)
from phalanx.cost.precision import Precision
from phalanx.schedule.schedule import Schedule
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes alive after forward pass and loss, before backward, by part; and at the moments when more are."""

    inputs: int = 0
    """What blocks share: indices of tokens and positions, rotary tables; for recomputation also the mask."""
    checkpoints: int = 0
    """Inputs of the blocks (full) or attentions (selective) that are computed again."""
    norms: int = 0
    """Of the residual stream. The stream itself is kept here, as their input, and nowhere else."""
    attention: int = 0
    """Projections, norms of queries and keys, and attention itself."""
    mlp: int = 0
    """Dense MLPs."""
    experts: int = 0
    """Routers, routed and shared experts."""
    tp_boundaries: int = 0
    """Of a stage of a pipeline what it was given and what it gives, where nothing else keeps that."""
    head_and_loss: int = 0
    """Input of the head, log-probabilities (at least fp32) and targets."""
    weight_copies: int = 0
    """Under autocast, bf16 copies of fp32 weights. They do not grow with the batch."""
    loss_gradients: int = 0
    """Not kept: gradients of log-probabilities and of the logits they are of, with which the backward pass begins
    beside everything else. (The forward pass ends with less: the logits, and of bf16 ones the fp32 copy.)"""
    mlp_gradients: int = 0
    """Not kept: the most on its way through the last MLP or experts in the backward pass, and the stream's gradient."""
    recomputed: int = 0
    """The most kept while a block or attention is computed again in the backward pass; 0 where none is."""
    recomputed_first: int = 0
    """The same of the first block, which is the last to be computed again."""
    residual_gradient: int = 0
    """Not kept: of the residual stream, between blocks."""
    deferred_weight_grads: int = 0
    """What a stage keeps of a micro-batch between the halves of its backward pass."""

    @property
    def total(self) -> int:
        """Bytes kept when the forward pass and the loss are done."""
        blocks = self.checkpoints + self.norms + self.attention + self.mlp + self.experts + self.tp_boundaries
        return self.inputs + blocks + self.head_and_loss + self.weight_copies

    @property
    def peak(self) -> int:
        """The most at one time: when the backward pass begins, or while something is computed again."""
        return max(self.at_backward_start, self.within_blocks())

    @property
    def at_backward_start(self) -> int:
        """When the backward pass begins, with the loss."""
        return self.total + self.loss_gradients

    def within_blocks(self, done: float = 0.0) -> int:
        """Inside a block of the backward pass of which a share is done: what those after it kept is free."""
        recomputed = self.recomputed + done * (self.recomputed_first - self.recomputed)
        return round(max((1 - done) * self._saved_in_blocks, recomputed)) + self.mlp_gradients

    def between_blocks(self, done: float) -> int:
        """Between two blocks of the backward pass, when the one is done with and the next not begun."""
        return round((1 - done) * self._saved_in_blocks) + self.residual_gradient

    @property
    def _saved_in_blocks(self) -> int:
        """Of the total what is still there when the backward pass is through the head."""
        return self.total - self.head_and_loss


@dataclass(frozen=True)
class StageBlocks:
    """A stage of a pipeline."""

    layers: range
    first: bool = False
    """It has the embedding."""
    last: bool = False
    """It has the head."""
    splits_backward: bool = False
    """Its backward passes are in two halves."""


def pipeline_stages(layers: Sequence[range], schedule: Schedule) -> list[StageBlocks]:
    """Of a pipeline with these layers in each."""
    last_index = len(layers) - 1
    return [
        StageBlocks(stage_layers, index == 0, index == last_index, splits_backward=schedule.splits_backward)
        for index, stage_layers in enumerate(layers)
    ]


def activation_bytes(
    spec: ModelSpec,
    batch: int,
    seq_len: int,
    precision: Precision,
    layout: Layout | None = None,
    autocast: bool = False,
    masked: bool = False,
    stage: StageBlocks | None = None,
    on_cuda: bool = False,
) -> ActivationBytes:
    """Activations of one rank for a micro-batch of `batch` sequences of `seq_len` tokens; in a pipeline those of one
    `stage`.

    Of tensor-parallel ranks one has a share of heads, inner widths and logits, and with sequence parallelism of the
    residual stream's tokens too, which norms and products keep (arXiv 2205.05198, section 4.2); of context-parallel
    ranks a share of every sequence; of expert-parallel ranks some experts, whose tokens are as many as its own where
    these are balanced.

    bf16 is either `autocast` over fp32 parameters (one process, DDP; no effect on fp32 and fp64), or parameters that
    are bf16 themselves (ZeRO). `masked`: documents in a sequence are hidden from each other. `on_cuda`: by CUDA's
    kernels, not by a CPU's.

    The backward pass frees what it is done with, so that while layer l is computed again there is what the layers
    before it keep, what it drops itself, and nothing of those after it or of the loss.
    """
    layout, stage = layout or Layout(), stage or StageBlocks(range(spec.num_layers), first=True, last=True)
    shape = ForwardShape(
        batch,
        seq_len,
        precision,
        layout=layout,
        autocast=autocast and precision == "bf16",
        masked=masked,
        on_cuda=on_cuda,
    )
    stream_bytes = _stream_bytes(spec, shape)
    inputs = Counter(inputs=saved_by_inputs(spec, shape, stage.first)) + _saved_at_stage_boundaries(spec, shape, stage)
    saved, recompute_peaks = _saved_by_blocks(spec, shape, stage.layers, inputs=inputs)
    deferred = _deferred_weight_grads(spec, shape, stage) if stage.splits_backward else []
    # What later layers, and the head, have put off.
    recompute_peaks = [size + sum(deferred[index + 1 :]) for index, size in enumerate(recompute_peaks)]
    mlp_gradients = mlp_backward_bytes(spec, stage.layers[-1], shape, splits_backward=stage.splits_backward)
    loss_gradients = 0
    if stage.last:
        saved += Counter(norms=saved_by_norm(spec, shape)) + saved_by_head(spec, shape)
        mlp_gradients += stream_bytes  # elsewhere the stream's gradient is a message
        loss_gradients = _loss_gradient_bytes(spec, shape)
    return ActivationBytes(
        **saved,
        loss_gradients=loss_gradients,
        mlp_gradients=mlp_gradients,
        residual_gradient=stream_bytes,
        recomputed=max(recompute_peaks, default=0),
        recomputed_first=recompute_peaks[0] if recompute_peaks else 0,
        deferred_weight_grads=sum(deferred),
    )


def _stream_bytes(spec: ModelSpec, shape: ForwardShape) -> int:
    """Return the bytes of the residual stream on this rank."""
    return shape.residual_tokens * spec.hidden_size * shape.residual_bytes


def _norm_saves_stream(spec: ModelSpec, shape: ForwardShape) -> bool:
    """Return whether a norm saves the residual stream itself; otherwise it saves an fp32 copy."""
    return shape.on_cuda or spec.norm == "layernorm" or shape.residual_bytes == shape.high_precision_bytes


def _saved_at_stage_boundaries(spec: ModelSpec, shape: ForwardShape, stage: StageBlocks) -> Counter[str]:
    """Return the input and output of a pipeline stage, where no block saves them."""
    stream_bytes = _stream_bytes(spec, shape)
    saved: Counter[str] = Counter()
    if not stage.first and not _norm_saves_stream(spec, shape) and shape.layout.activation_checkpointing != "full":
        saved += Counter(tp_boundaries=stream_bytes)
    if not stage.last:
        saved += Counter(tp_boundaries=stream_bytes)
    return saved


def _saved_by_blocks(
    spec: ModelSpec, shape: ForwardShape, layers: range, inputs: Counter[str]
) -> tuple[Counter[str], list[int]]:
    """Return `inputs` with the tensors saved by all blocks, and per block the bytes alive while it is recomputed.

    The list is empty without activation checkpointing.
    """
    saved = inputs.copy()
    recompute_peaks = list[int]()
    stream_bytes = _stream_bytes(spec, shape)
    checkpoint = Counter(checkpoints=stream_bytes)
    norm_saved = Counter(norms=saved_by_norm(spec, shape))
    attention_saved = saved_by_attention(spec, shape)
    for layer in layers:
        mlp_saved = (
            saved_by_experts(spec, spec.moe, shape)
            if spec.moe and spec.is_moe_layer(layer)
            else saved_by_mlp(spec, shape)
        )
        if shape.layout.activation_checkpointing == "full":
            saved += checkpoint
            # The first norm keeps the block's input, which is there already, unless it needs it in fp32.
            already_saved = stream_bytes if _norm_saves_stream(spec, shape) else 0
            recompute_peaks.append(
                (saved + norm_saved + attention_saved + norm_saved + mlp_saved).total() - already_saved
            )
        elif shape.layout.activation_checkpointing == "selective":
            saved += norm_saved + checkpoint
            # Likewise the projections their input, unless autocast makes copies of it.
            recompute_peaks.append((saved + attention_saved).total() - (0 if shape.autocast else stream_bytes))
            saved += norm_saved + mlp_saved
        else:
            saved += norm_saved + attention_saved + norm_saved + mlp_saved
    return saved, recompute_peaks


def _deferred_weight_grads(spec: ModelSpec, shape: ForwardShape, stage: StageBlocks) -> list[int]:
    """Return the bytes saved between the halves of a split backward pass, per block and for the head."""
    deferred = [deferred_weight_grad_bytes(spec, layer, shape) for layer in stage.layers]
    return deferred + ([deferred_head_grad_bytes(spec, shape)] if stage.last else [])


def _loss_gradient_bytes(spec: ModelSpec, shape: ForwardShape) -> int:
    """Return the bytes of the gradients of log-probabilities and logits at the start of the backward pass."""
    # Of shared logits only the gradient in what the loss computes in, and where that is not theirs the other.
    bytes_per_logit = (
        2 * shape.high_precision_bytes
        if shape.tp == 1
        else shape.high_precision_bytes
        + (shape.compute_bytes if shape.compute_bytes < shape.high_precision_bytes else 0)
    )
    return shape.tokens * shape.max_local_count(spec.vocab_size) * bytes_per_logit


@dataclass(frozen=True)
class PeakInFlightBytes:
    """The most that a rank of a pipeline has of activations, in bytes."""

    forward_only: int
    """Until it has gradients of its parameters."""
    with_gradients: int
    """From then on."""


def peak_in_flight_bytes(
    schedule: Schedule, rank: int, saved: Sequence[ActivationBytes], inside: int
) -> PeakInFlightBytes:
    """Of activations that every stage keeps of a micro-batch from the forward to the backward pass, and between that
    pass's halves; and what is on its way `inside` blocks."""
    stage_activations = {stage: saved[stage] for stage in schedule.stages_of(rank)}
    sizes = {
        stage: (
            activations.total,
            max(activations.at_backward_start, activations.within_blocks() + inside),
            activations.deferred_weight_grads,
            activations.within_blocks(1.0) + inside,
        )
        for stage, activations in stage_activations.items()
    }
    live = 0
    has_gradients = False
    peaks = [0, 0]
    for stage, kind, _ in schedule.actions(rank):
        total, peak, deferred, end_peak = sizes[stage]
        current = live + (total if kind == "F" else 0 if kind == "W" else peak - total)
        if kind == "W":
            has_gradients = True
        if current > peaks[has_gradients]:
            peaks[has_gradients] = current
        if kind == "F":
            live += total
        elif kind == "I":
            live += deferred - total
        elif kind == "W":
            live -= deferred
        else:
            live, has_gradients = live - total, True
            if live + end_peak > peaks[True]:
                peaks[True] = live + end_peak
    return PeakInFlightBytes(*peaks)
