"""Model-parallel traffic of a micro-batch in a stage: activations and their gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

from phalanx.cost.exact.activation_memory import StageBlocks
from phalanx.cost.exact.derive.traffic import (
    SCALARS_PURPOSE,
    TrafficRows,
    collective_traffic,
    inference_traffic,
    part_traffic,
    tp_gather,
    tp_reduce,
)
from phalanx.cost.exact.forward_shape import ForwardShape
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.block import blocks
from phalanx.spec.parts.model import is_head_trained, layer_inputs, model_parameters


def stage_inference_traffic(spec: ModelSpec, shape: ForwardShape, stage: StageBlocks) -> TrafficRows:
    """Return the traffic of a rank in a stage without gradients, up to the gathered input of the head."""
    model_blocks = blocks(spec, shape.layout)
    traffic = [
        row
        for layer in stage.layers
        for branch in model_blocks[layer]
        for row in inference_traffic(branch.part, shape=shape)
    ]
    if stage.first:
        traffic += tp_reduce(shape, shape.tokens * spec.hidden_size * shape.residual_bytes)
        if inputs := layer_inputs(spec):
            traffic += tp_reduce(shape, shape.tokens * inputs.operations[0].writes.width * shape.residual_bytes)
    if stage.last:
        traffic += tp_gather(shape, shape.tokens * spec.hidden_size * shape.compute_bytes)
    if spec.moe and shape.layout.sequence_parallel:  # the auxiliary loss, which is 0
        traffic += collective_traffic("all_reduce", shape.high_precision_bytes, shape.tp, SCALARS_PURPOSE, "tp")
    return [row for row in traffic if row.bytes]


def stage_activation_traffic(spec: ModelSpec, shape: ForwardShape, stage: StageBlocks) -> TrafficRows:
    """Return the traffic of a rank in both passes through a stage, with balanced experts.

    Messages between pipeline stages are not included.

    Args:
        shape: Sizes of a micro-batch on one rank.
        stage: Blocks of a stage, or of the full model.
    """
    traffic: TrafficRows = []
    model_blocks = blocks(spec, shape.layout)
    traffic_of = cache(partial(part_traffic, shape=shape))
    # Blocks before all trained parameters have a forward pass only.
    for layer in range(stage.layers.start) if shape.layout.pp == 1 else ():
        for branch in model_blocks[layer]:
            traffic += traffic_of(branch.part).forward
    for index, layer in enumerate(stage.layers):
        for branch in model_blocks[layer]:
            part = traffic_of(branch.part)
            traffic += part.forward + part.backward
            is_recomputed = shape.layout.recomputes_full_blocks or branch.part.kind == "attention"
            if is_recomputed and index < stage.recomputed and shape.layout.recomputes_attention:
                traffic += part.recompute
    x, stream_bytes = (shape.tokens * spec.hidden_size * size for size in (shape.compute_bytes, shape.residual_bytes))
    if inputs := layer_inputs(spec):
        rows = shape.tokens * inputs.operations[0].writes.width * shape.residual_bytes
        traffic += tp_reduce(shape, rows) + tp_gather(shape, rows)
    if num_embedded := stage.num_embedded(spec):
        traffic += tp_reduce(shape, num_embedded * stream_bytes)
        if not model_parameters(spec)["embedding.weight"].is_frozen:
            traffic += tp_gather(shape, num_embedded * stream_bytes)
    for _ in range(spec.num_logits if stage.last else 0):
        num_chunks = shape.num_logits_chunks(spec)
        # The backward pass gathers the head's input again, unless chunks have gradients in the forward pass.
        computes_all = shape.computes_head_gradients(spec)
        gathers_again = shape.recomputes_logits if computes_all else is_head_trained(spec)
        traffic += tp_gather(shape, x) + (tp_gather(shape, x) if gathers_again else []) + tp_reduce(shape, x)
        # Of each row: the maximum; then the sum and the target's logit. With a teacher: of both; then five sums.
        for values in (2, 5) if shape.has_teacher else (1, 2):
            size = values * shape.tokens * shape.high_precision_bytes
            sums = collective_traffic("all_reduce", size, shape.tp, purpose=SCALARS_PURPOSE, group_kind="tp")
            traffic += [replace(row, calls=num_chunks) for row in sums]
    return [row for row in traffic if row.bytes]
