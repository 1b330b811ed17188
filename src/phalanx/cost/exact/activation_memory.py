"""Activations that a micro-batch's forward pass saves for its backward pass. Exact, without torch.

The method is that of Korthikanti et al. (arXiv 2205.05198, section 4): for each operation, count the tensors that it
saves to compute its gradient. Their sum per layer, T B D (34 + 5 H T / D) bytes, is for GPT in 16 bits with dropout.
This one differs: flash attention (arXiv 2205.14135) saves a row's logsumexp instead of T x T scores and their softmax,
there are no dropout layers, SwiGLU saves two inner tensors and GELU one, and autocast saves a bf16 copy of a linear
layer's input for each layer that reads it.

The counts are those of PyTorch's CPU kernels, uncompiled, and tested against them to the byte; or those of its CUDA
kernels (`on_cuda`), which differ in norms and in their tensors for documents. Not counted: key/value heads that the
model repeats in fp32 on CUDA if a mask is needed (`model/attention.py`). Of temporary tensors, the loss's (N V numbers
each, usually the largest) and recomputed ones are counted; gradients between layers are not.

Symbols: B sequences, T tokens in each, N = B T, D width, H heads, K head width, F inner width, V vocabulary, E experts,
k of them per token; q and kv are the widths of all query and of all key/value heads together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.cost.exact.activation_bytes import ActivationBytes, RunningBlock
from phalanx.cost.exact.block_moments import SavedByPart, block_moments, replaces_output_gradient
from phalanx.cost.exact.derive.saved import (
    branch_norm_bytes,
    norm_bytes,
    norm_output_bytes,
    saved_by_expert_rows,
    saved_by_part,
    shared_output_bytes,
)
from phalanx.cost.exact.derive.temporary import activated_linear
from phalanx.cost.exact.forward_shape import INDEX_BYTES, ForwardShape
from phalanx.cost.exact.head_memory import head_gradient_bytes, loss_bytes, saved_by_head, widened_head_bytes
from phalanx.cost.exact.split_backward_memory import deferred_bytes, weight_gradient_bytes, widened_gradient_bytes
from phalanx.schedule.schedule import Schedule
from phalanx.spec.layers import layer_specs
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.block import Block, blocks, describe_last_norm, mixer_branch, residual_stream
from phalanx.spec.parts.model import layer_inputs, model_parameters, num_forward_only_blocks


@dataclass(frozen=True, kw_only=True)
class StageBlocks:
    """Stage of a pipeline."""

    layers: range
    first: bool = False
    """True if the stage has the embedding."""
    last: bool = False
    """True if the stage has the head."""
    splits_backward: bool = False
    """True if the stage's backward passes are in two halves."""
    recomputed: int = 0
    """Number of blocks, the first ones, that recompute activations."""

    def num_embedded(self, spec: ModelSpec) -> int:
        """Return the number of tokens that the stage embeds for each of its tokens."""
        return int(self.first) + (spec.num_prediction_layers if self.last else 0)

    def num_offloaded(self, shape: ForwardShape) -> int:
        """Return the number of recomputed blocks, the last ones, whose inputs are in CPU memory.

        The pipeline keeps the input of a stage on the device. On CPUs, all memory counts as the device's.
        """
        if shape.layout.activation_checkpointing != "offload" or not shape.on_cuda:
            return 0
        return max(0, self.recomputed - (not self.first))


def pipeline_stages(layers: Sequence[range], schedule: Schedule, layout: Layout) -> list[StageBlocks]:
    """Return the stages of a pipeline.

    Args:
        layers: Layers of each stage.
        schedule: Schedule of the pipeline.
    """
    last_index = len(layers) - 1
    stages: dict[int, StageBlocks] = {}
    for rank in range(layout.pp):
        local_stages = schedule.stages_of(rank)
        recomputed = layout.recomputed_on_rank(rank, sum(len(layers[stage]) for stage in local_stages))
        for index in local_stages:
            stages[index] = StageBlocks(
                layers=layers[index],
                first=index == 0,
                last=index == last_index,
                splits_backward=schedule.splits_backward,
                recomputed=min(recomputed, len(layers[index])),
            )
            recomputed -= stages[index].recomputed
    return [stages[index] for index in range(len(layers))]


def full_model_stage(spec: ModelSpec, layout: Layout) -> StageBlocks:
    """Return the only stage of a model without a pipeline."""
    count = spec.num_blocks
    # The first blocks save nothing if nothing up to them is trained.
    first = min(num_forward_only_blocks(spec), count - 1)
    recomputed = max(0, layout.recomputed_on_rank(0, count) - first)
    return StageBlocks(layers=range(first, count), first=True, last=True, recomputed=recomputed)


def activation_bytes(spec: ModelSpec, shape: ForwardShape, stage: StageBlocks | None = None) -> ActivationBytes:
    """Return the activations of one rank for a micro-batch, in a pipeline those of one stage.

    A tensor-parallel rank has a shard of heads, inner widths and logits. With sequence parallelism it also has a shard
    of the residual stream's tokens, which norms and products save (arXiv 2205.05198, section 4.2). A context-parallel
    rank has a shard of every sequence. An expert-parallel rank has some experts and, if balanced, its number of tokens.

    Backward frees tensors after use. While layer l is recomputed, memory contains what previous layers saved and what
    layer l recomputes, but nothing of later layers or the loss.
    """
    layout = shape.layout
    stage = stage or full_model_stage(spec, layout)
    model_blocks = blocks(spec, layout)
    stage_blocks = [model_blocks[layer] for layer in stage.layers]
    saved_by = {branch.part: saved_by_part(spec, branch.part, shape) for block in set(stage_blocks) for branch in block}
    inputs = _saved_by_inputs(spec, shape, stage)
    saved, saved_so_far, inside_blocks = _saved_by_blocks(
        spec, stage_blocks, shape, stage, saved_by=saved_by, inputs=inputs
    )
    waiting = _waiting_gradients(spec, stage_blocks, shape)
    deferred = (
        deferred_bytes(spec, shape, blocks=stage_blocks, recomputed=stage.recomputed, last=stage.last)
        if stage.splits_backward
        else []
    )
    # In all stages but the last, the gradient of the block's output is a message.
    stream_bytes = _stream_bytes(spec, shape) if stage.last else 0
    running = {
        block: RunningBlock(
            moments=block_moments(
                block,
                shape,
                saved_by=saved_by,
                output_gradient=0 if replaces_output_gradient(block) else stream_bytes,
                splits_backward=stage.splits_backward,
            ),
            **_expert_bytes(block, shape),
        )
        for block in dict.fromkeys(stage_blocks)
    }
    unequal_blocks = [
        replace(running[block], inside=inside + gradients, saved=saved_bytes + gradients)
        for block, inside, saved_bytes, gradients in zip(
            stage_blocks, inside_blocks, saved_so_far, waiting, strict=True
        )
    ]
    # Weight gradients that later layers and the head have deferred.
    inside_blocks = [size + sum(deferred[index + 1 :]) for index, size in enumerate(inside_blocks)]
    recompute_peaks = inside_blocks[: stage.recomputed] if shape.layout.recomputes_attention else []
    return ActivationBytes(
        **(saved + _saved_by_head(spec, shape, stage)),
        loss=loss_bytes(spec, shape) if stage.last else 0,
        head_gradients=head_gradient_bytes(spec, shape, stage.splits_backward) if stage.last else 0,
        saved_by_final_norm=norm_bytes(describe_last_norm(spec), shape) if stage.last else 0,
        last_block=running[stage_blocks[-1]],
        unequal_blocks=tuple(unequal_blocks) if any(waiting) or _are_unequal(running, saved_by) else (),
        layer_input_gradients=_layer_input_gradients(spec, shape),
        residual_gradient=_stream_bytes(spec, shape),
        **_offloaded_inputs(spec, shape, stage),
        recomputed=max(recompute_peaks, default=0),
        recomputed_first=recompute_peaks[0] if recompute_peaks else 0,
        deferred_weight_grads=sum(deferred),
        inside_blocks=max(inside_blocks),
        weight_gradient=weight_gradient_bytes(spec, shape, blocks=stage_blocks, last=stage.last) if deferred else 0,
        widened_head=widened_head_bytes(spec, shape, stage.splits_backward) if stage.last else 0,
        widened_gradient=widened_gradient_bytes(spec, shape, blocks=stage_blocks, last=stage.last) if deferred else 0,
        embedding_gradient=shape.max_local_count(spec.vocab_size) * spec.hidden_size * shape.residual_bytes
        if stage.first and not model_parameters(spec)["embedding.weight"].is_frozen
        else 0,
    )


def _waiting_gradients(spec: ModelSpec, model_blocks: Sequence[Block], shape: ForwardShape) -> list[int]:
    """Return the bytes of gradients that later layers have left when a block runs backward.

    They are those of the inputs of layers, and of keys and values until their layer adds them."""
    sizes = [0] * len(model_blocks)
    if spec.per_layer_input_size:
        given_bytes = shape.residual_tokens * spec.per_layer_input_size * shape.compute_bytes
        sizes = [given_bytes * later for later in reversed(range(len(model_blocks)))]
    last_reader = {source: reader for reader, source in spec.kv_sources.items()}
    for source, reader in last_reader.items():
        for layer in range(source, reader):
            sizes[layer] += _key_value_bytes(model_blocks[source], shape)
    return sizes


def _key_value_bytes(block: Block, shape: ForwardShape) -> int:
    """Return the bytes of the keys and values of a block with attention."""
    (core,) = (core for branch in block for core in branch.part.attention_cores)
    return sum(map(shape.operand_bytes, core.reads[1:]))


def _layer_input_gradients(spec: ModelSpec, shape: ForwardShape) -> int:
    """Return the bytes of the inputs of layers at the end of the backward pass: what is saved for them, and gradients.

    The gradients of all layers have just become one tensor."""
    part = layer_inputs(spec)
    if part is None:
        return 0
    return saved_by_part(spec, part, shape).total() + shape.operand_bytes(part.operations[-1].writes)


def _are_unequal(running: Mapping[Block, RunningBlock], saved_by: SavedByPart) -> bool:
    """Return whether the blocks of a stage save or need different numbers of bytes."""
    saved = {sum(saved_by[branch.part].total() for branch in block) for block in running}
    return len(saved) > 1 or len(set(running.values())) > 1


def _expert_bytes(block: Block, shape: ForwardShape) -> dict[str, int]:
    """Return what a block's experts save for their rows, and the gradient of these."""
    part = next((branch.part for branch in block if branch.part.kind == "experts"), None)
    if part is None:
        return {}
    return {
        "saved_by_expert_rows": saved_by_expert_rows(part, shape),
        "expert_input_gradient": shape.operand_bytes(activated_linear(part).writes),
    }


def _offloaded_inputs(spec: ModelSpec, shape: ForwardShape, stage: StageBlocks) -> dict[str, Any]:
    """Return the fields of offloaded inputs."""
    num_offloaded = stage.num_offloaded(shape)
    return {
        "offloaded": num_offloaded * _stream_bytes(spec, shape),
        "prefetched": _stream_bytes(spec, shape) if num_offloaded > 1 else 0,
        "prefetch_end": 1 - (stage.recomputed - num_offloaded + 2) / len(stage.layers),
    }


def _stream_bytes(spec: ModelSpec, shape: ForwardShape) -> int:
    """Return the bytes of the residual stream on this rank."""
    return shape.value_bytes(residual_stream(spec))


def _saved_by_inputs(spec: ModelSpec, shape: ForwardShape, stage: StageBlocks) -> Counter[str]:
    """Return what blocks share, and the input and output of a pipeline stage if no block saves them."""
    stream_bytes = _stream_bytes(spec, shape)
    recomputes = stage.recomputed > 0 and shape.layout.recomputes_attention
    saved = Counter(inputs=_saved_by_shared_inputs(spec, shape, stage, recomputes=recomputes))
    if not stage.last:
        saved += Counter(tp_boundaries=stream_bytes)
    if part := layer_inputs(spec):
        saved += saved_by_part(spec, part, shape)
        # The first block saves the output of the embedding too, unless it is in CPU memory.
        if not shape.autocast and not stage.num_offloaded(shape):
            saved -= Counter(inputs=stream_bytes)
        if shape.tp > 1:  # indices and flags of its own
            saved += Counter(inputs=shape.tokens * (INDEX_BYTES + 1))
    return saved


def _saved_by_head(spec: ModelSpec, shape: ForwardShape, stage: StageBlocks) -> Counter[str]:
    """Return what the last stage saves after its blocks: the last norm, the head and the loss."""
    if not stage.last:
        return Counter()
    return Counter(norms=norm_bytes(describe_last_norm(spec), shape)) + saved_by_head(spec, shape)


def _saved_by_blocks(
    spec: ModelSpec,
    stage_blocks: Sequence[Block],
    shape: ForwardShape,
    stage: StageBlocks,
    saved_by: SavedByPart,
    inputs: Counter[str],
) -> tuple[Counter[str], list[int], list[int]]:
    """Return `inputs` with the tensors saved by all blocks, the bytes saved up to each, and those alive inside it.

    The latter is what blocks up to it have saved, and what is recomputed. Recomputed blocks are the first ones, so
    nothing of the others is left by then. While a block with an offloaded input runs again, the input of the block
    before it is copied back.
    """
    saved = inputs.copy()
    inside_blocks = list[int]()
    saved_so_far = list[int]()
    stream_bytes = shape.value_bytes(stage_blocks[0][0].part.input)
    checkpoint = Counter(checkpoints=stream_bytes)
    on_device = stage.recomputed - stage.num_offloaded(shape)
    # Blocks that run again keep the keys and values of others, and other blocks do unless they have copies.
    is_read = {
        source for reader, source in spec.kv_sources.items() if shape.layout.cp == 1 or reader < stage.recomputed
    }
    for index, block in enumerate(stage_blocks):
        method = shape.layout.activation_checkpointing if index < stage.recomputed else "none"
        if index in is_read and method in ("full", "offload", "selective"):
            saved += Counter(attention=_key_value_bytes(block, shape))
        by_branch = [
            Counter(norms=branch_norm_bytes(branch, shape))
            + saved_by[branch.part]
            - Counter({branch.part.kind: shared_output_bytes(block, branch, shape)})
            for branch in block
        ]
        if method in ("full", "offload"):
            saved += checkpoint if index < on_device else Counter()
            again = saved.total() + sum(branch.total() for branch in by_branch)
            # The first norm saves the block's input, which a block that is not offloaded has saved already.
            other_inputs = (index > on_device) - (index < on_device)
            inside_blocks.append(again + other_inputs * stream_bytes)
        elif method == "selective" and (attention := mixer_branch(block)):
            saved += Counter(norms=branch_norm_bytes(attention, shape)) + checkpoint
            # Parallel mixers run again one after the other.
            mixers = [branch for branch in block if branch.part.kind == attention.part.kind]
            # The projections also save their input, unless autocast makes copies of it.
            again = saved.total() + max(saved_by[mixer.part].total() for mixer in mixers)
            inside_blocks.append(again - (0 if shape.autocast else stream_bytes))
            others = (size for branch, size in zip(block, by_branch, strict=True) if branch not in mixers)
            saved += sum(others, Counter())
        else:
            for branch, size in zip(block, by_branch, strict=True):
                saved += size
                if method == "norms" and (branch.before or branch.shares_norm):
                    recomputed = norm_output_bytes(branch.part, shape) - shared_output_bytes(block, branch, shape)
                    saved -= Counter({branch.part.kind: recomputed})
            inside_blocks.append(saved.total())
        saved_so_far.append(saved.total())
    return saved, saved_so_far, inside_blocks


def _saved_by_shared_inputs(spec: ModelSpec, shape: ForwardShape, stage: StageBlocks, recomputes: bool) -> int:
    """Return the bytes that the blocks of a stage share, and of the tokens that it embeds.

    `recomputes` is True if a block of the stage recomputes activations."""
    is_ring = shape.layout.cp > 1 and shape.layout.cp_method == "ring"
    # Positions restart with each document.
    num_positions = shape.tokens if shape.masked else shape.tokens // shape.batch
    # Embedding: indices, and a flag for rows on other ranks.
    parameters = model_parameters(spec)
    num_embedded = 0 if parameters["embedding.weight"].is_frozen else stage.num_embedded(spec)
    token_bytes = num_embedded * shape.tokens * (INDEX_BYTES if shape.tp == 1 else INDEX_BYTES + 1)
    # Learned: the embedding's indices; for contiguous shards of tokens (ulysses) a view of the full row's.
    position_bytes = (num_positions if is_ring or shape.masked else shape.sequence) * INDEX_BYTES
    layers = {layer_specs(spec)[index] for index in stage.layers}
    # Rotary embedding: products with cosine and sine, in a table of each kind.
    tables = {(layer.rope, layer.rotary_width) for layer in layers if layer.position_embedding == "rope"}
    rotated_channels = sum(width for _, width in tables)
    table_bytes = 2 * num_positions * rotated_channels * shape.high_precision_bytes
    temperatures = {layer.query_temperature for layer in layers if layer.query_temperature}
    table_bytes += len(temperatures) * num_positions * shape.high_precision_bytes
    # The mask is bool, for recomputation. A ring has the bounds of documents on the host.
    masks = {(layer.head_dim, layer.attention_chunk) for layer in layers if layer.attends}
    num_masks = sum(shape.has_dense_mask(spec, *mask) for mask in masks)
    mask_bytes = num_masks * shape.batch * shape.sequence**2 if recomputes else 0
    if spec.embedding_norm:
        # Its input, and a statistic of each token.
        numbers = spec.hidden_size * shape.residual_bytes + shape.high_precision_bytes
        token_bytes += stage.num_embedded(spec) * shape.residual_tokens * numbers
    has_positions = spec.position_embedding == "learned" and not parameters["positions.weight"].is_frozen
    saved_bytes = table_bytes + (position_bytes if has_positions and stage.first else 0)
    return saved_bytes + token_bytes + mask_bytes
