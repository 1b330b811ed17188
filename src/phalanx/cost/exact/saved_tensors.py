"""Bytes that each part of a model's forward pass saves for the backward pass.

`cost.exact.activation_memory` sums them, and explains the symbols."""

from __future__ import annotations

from collections import Counter

from phalanx.cost.exact.forward_shape import ForwardShape
from phalanx.spec.model import ModelSpec, MoESpec

INDEX_BYTES = 8
"""Bytes of an index of a token, target, position or rank in an order: int64."""
STATISTIC_BYTES = 4
"""Bytes of a mean, 1 / std or log-sum-exp that a CUDA kernel saves: fp32."""


def saved_by_inputs(spec: ModelSpec, shape: ForwardShape, first: bool, recomputes: bool) -> int:
    """Return the bytes that the blocks of a stage share.

    Args:
        shape: Sizes of a micro-batch on one rank.
        first: True for the first stage, which also saves the tokens.
        recomputes: True if a block of the stage recomputes activations.
    """
    is_ring = shape.layout.cp > 1 and shape.layout.cp_method == "ring"
    # Positions restart with each document.
    num_positions = shape.tokens if shape.masked else shape.tokens // shape.batch
    # Embedding: indices, and a flag for rows on other ranks.
    token_bytes = shape.tokens * (INDEX_BYTES if shape.tp == 1 else INDEX_BYTES + 1)
    # Learned: the embedding's indices; for contiguous shards of tokens (ulysses) a view of the full row's.
    position_bytes = (num_positions if is_ring or shape.masked else shape.sequence) * INDEX_BYTES
    table_bytes = 2 * num_positions * spec.head_dim * shape.high_precision_bytes  # rope: products with cosine and sine
    # The mask is bool, for recomputation. A ring has the bounds of documents on the host.
    mask_bytes = shape.batch * shape.sequence**2 if shape.has_dense_mask(spec) and recomputes else 0
    saved_bytes = table_bytes if spec.position_embedding == "rope" else position_bytes if first else 0
    return saved_bytes + (token_bytes if first else 0) + mask_bytes


def saved_by_norm(spec: ModelSpec, shape: ForwardShape) -> int:
    """Return the bytes that a norm of the residual stream saves."""
    if spec.norm == "layernorm":  # x, its mean and 1 / std
        statistic_bytes = STATISTIC_BYTES if shape.on_cuda else shape.residual_bytes
        return shape.residual_tokens * (spec.hidden_size * shape.residual_bytes + 2 * statistic_bytes)
    return _rms_norm_bytes(shape.residual_tokens, spec.hidden_size, input_bytes=shape.residual_bytes)


def _rms_norm_bytes(vectors: int, width: int, input_bytes: int) -> int:
    """Return the bytes of x and 1 / rms, which an RMSNorm saves over `vectors` of `width` (`model.norm`)."""
    return vectors * (width * input_bytes + max(STATISTIC_BYTES, input_bytes))


def saved_by_attention(spec: ModelSpec, shape: ForwardShape) -> Counter[str]:
    """Return the bytes that attention saves, including projections and the norms of queries and keys.

    Flash attention saves q, k, v, its output, which is wo's input, and the logsumexp of each row and head. A mask is
    saved as additive numbers. With context parallelism wo's input is a copy. Ring attention (`layout.cp_method`) saves
    no mask, and with Ulysses key/value heads are repeated if they are fewer than the ranks."""
    if shape.tp > 1 and shape.layout.tp_attention == "gathered":
        return _saved_by_gathered_attention(spec, shape)
    D = spec.hidden_size
    H = shape.max_local_count(spec.num_heads)
    K = spec.head_dim
    kv_heads = shape.max_local_count(spec.num_kv_heads)
    q = H * K
    kv = kv_heads * K
    saved_bytes = shape.linear_input_bytes(D, readers=3)  # wq, wk, wv
    weights = 2 * D * (q + kv)
    if spec.qk_norm == "head":
        saved_bytes += _rms_norm_bytes(shape.tokens * (H + kv_heads), K, input_bytes=shape.compute_bytes)
        weights += 2 * K if shape.on_cuda else 0
    elif spec.qk_norm == "full":
        saved_bytes += _full_qk_norm_bytes(shape, q) + _full_qk_norm_bytes(shape, kv)
        weights += q + kv if shape.on_cuda or shape.tp > 1 else 0
    cp = shape.layout.cp
    is_ring = shape.layout.cp_method == "ring"
    kv_inner = kv if cp == 1 or is_ring else max(kv_heads, cp) * K
    saved_bytes += shape.tokens * (2 * q + 2 * kv_inner + (q if cp > 1 else 0)) * shape.compute_bytes
    saved_bytes += shape.tokens * H * shape.high_precision_bytes
    saved_bytes += _mask_bytes(spec, shape)
    return Counter(attention=saved_bytes, weight_copies=shape.weight_copies(weights))


def _saved_by_gathered_attention(spec: ModelSpec, shape: ForwardShape) -> Counter[str]:
    """Return the bytes that attention saves if ranks have columns of heads.

    Ranks have full queries and keys, and the values, output and logsumexp of the heads to which their columns belong.
    """
    D = spec.hidden_size
    K = spec.head_dim
    full_width = spec.num_heads * spec.head_dim
    columns = full_width // shape.tp
    local_heads = max(-(-(start + columns) // K) - start // K for start in range(0, full_width, columns))
    saved_bytes = shape.linear_input_bytes(D, readers=3)
    weights = 4 * D * columns
    if spec.qk_norm == "head":
        saved_bytes += _rms_norm_bytes(2 * shape.tokens * spec.num_heads, K, input_bytes=shape.compute_bytes)
        weights += 2 * K if shape.on_cuda else 0
    elif spec.qk_norm == "full":
        saved_bytes += 2 * _rms_norm_bytes(shape.tokens, full_width, input_bytes=shape.compute_bytes)
        weights += 2 * full_width if shape.on_cuda else 0
    saved_bytes += (
        shape.tokens * (2 * full_width + 2 * local_heads * K) * shape.compute_bytes
        + shape.tokens * local_heads * shape.high_precision_bytes
    )
    saved_bytes += _mask_bytes(spec, shape)
    return Counter(attention=saved_bytes, weight_copies=shape.weight_copies(weights))


def _mask_bytes(spec: ModelSpec, shape: ForwardShape) -> int:
    """Return the bytes of a layer's additive document mask, [B, T, T]; 0 if attention is computed by document."""
    return shape.batch * shape.sequence**2 * shape.compute_bytes if shape.has_dense_mask(spec) else 0


def _full_qk_norm_bytes(shape: ForwardShape, width: int) -> int:
    """Return the bytes that a norm over all heads saves; ranks that share heads use single operations."""
    if shape.tp == 1:
        return _rms_norm_bytes(shape.tokens, width, input_bytes=shape.compute_bytes)
    return shape.tokens * (width * (shape.high_precision_bytes + shape.compute_bytes) + shape.high_precision_bytes)


def saved_by_mlp(spec: ModelSpec, shape: ForwardShape) -> Counter[str]:
    """Return the bytes that a dense MLP saves."""
    ffn = shape.max_local_count(spec.ffn_hidden_size)
    if spec.activation == "swiglu":
        return Counter(
            mlp=_swiglu_bytes(shape, spec.hidden_size, ffn),
            weight_copies=shape.weight_copies(3 * spec.hidden_size * ffn),
        )
    saved_bytes = shape.linear_input_bytes(spec.hidden_size, readers=1)  # up
    saved_bytes += shape.tokens * ffn * shape.compute_bytes  # gelu's input; its output is recomputed
    return Counter(mlp=saved_bytes, weight_copies=shape.weight_copies(2 * spec.hidden_size * ffn))


def _swiglu_bytes(shape: ForwardShape, width: int, ffn: int) -> int:
    inner_bytes = 2 * shape.tokens * ffn * shape.compute_bytes  # gate x and up x; the rest is recomputed
    return shape.linear_input_bytes(width, readers=2) + inner_bytes  # gate, up


def saved_by_experts(spec: ModelSpec, moe: MoESpec, shape: ForwardShape) -> Counter[str]:
    """Return the bytes that routers, routed experts and shared experts save.

    Experts are balanced and drop no tokens, so the assignment of tokens does not matter. With expert parallelism each
    rank receives as many rows as it sends.

    Args:
        moe: Experts of the model, `spec.moe`.
        shape: Sizes of a micro-batch on one rank.
    """
    D = spec.hidden_size
    E = moe.num_experts
    k = moe.top_k
    ep = shape.layout.ep
    rows, F = expert_rows(moe, shape)
    shared = shape.max_local_count(moe.expert_ffn_size * moe.num_shared_experts) if moe.num_shared_experts else 0
    saved_bytes = shape.linear_input_bytes(D, readers=1)  # the router
    if shared and shape.autocast:  # else gate and up of the shared experts read what the router does
        saved_bytes += shape.linear_input_bytes(D, readers=2)
    saved_bytes += 2 * shape.tokens * shared * shape.compute_bytes  # as in a SwiGLU
    # z-loss: logits and logsumexp; softmax or sigmoid: scores
    saved_bytes += shape.residual_tokens * (2 * E + 1) * shape.high_precision_bytes
    # Balance loss: sums of scores.
    saved_bytes += shape.residual_tokens * shape.high_precision_bytes if moe.router_score == "sigmoid" else 0
    # Selected scores and their sums.
    saved_bytes += shape.residual_tokens * (k + 1) * shape.high_precision_bytes if moe.normalize_top_k else 0
    # Balance loss: fractions of tokens.
    saved_bytes += (1 if moe.balance_loss_scope == "micro_batch" else shape.batch) * E * shape.high_precision_bytes
    # Gather: selected experts; sorting by expert, and back.
    saved_bytes += (shape.residual_tokens * k + 2 * rows) * INDEX_BYTES
    saved_bytes += 2 * rows * INDEX_BYTES if ep > 1 else 0  # sorting received rows by expert, and back
    saved_bytes += saved_by_expert_rows(spec, moe, shape)
    return Counter(experts=saved_bytes, weight_copies=shape.weight_copies(D * E + 3 * D * (F * E // ep + shared)))


def saved_by_expert_rows(spec: ModelSpec, moe: MoESpec, shape: ForwardShape) -> int:
    """Return the part of `saved_by_experts` of the rows: each expert's SwiGLU, and the weighted sum of outputs.

    Args:
        moe: Experts of the model, `spec.moe`.
        shape: Sizes of a micro-batch on one rank.
    """
    rows, F = expert_rows(moe, shape)
    experts = rows * (spec.hidden_size + 2 * F)
    weighted_sum = rows * (spec.hidden_size + 1)
    return (experts + weighted_sum) * shape.compute_bytes


def norm_output_bytes(spec: ModelSpec, layer: int, shape: ForwardShape) -> Counter[str]:
    """Return the part of a block's saved bytes that are outputs of its norms, which products read.

    Args:
        layer: Index of the block in the model.
        shape: Sizes of a micro-batch on one rank.
    """
    D = spec.hidden_size
    attention_bytes = shape.linear_input_bytes(D, readers=3)
    if spec.moe is None or not spec.is_moe_layer(layer):
        num_up_layers = 2 if spec.activation == "swiglu" else 1
        return Counter(attention=attention_bytes, mlp=shape.linear_input_bytes(D, readers=num_up_layers))
    expert_bytes = shape.linear_input_bytes(D, readers=1)  # the router
    if spec.moe.num_shared_experts and shape.autocast:
        expert_bytes += shape.linear_input_bytes(D, readers=2)
    return Counter(attention=attention_bytes, experts=expert_bytes)


def fp8_cast_bytes(spec: ModelSpec, layer: int, shape: ForwardShape) -> int:
    """Return the temporary bytes of the casts for the input gradient of a block's last product; 0 without float8.

    A CPU, which emulates the product, also has the numbers that the casts represent.

    Args:
        layer: Index of the block in the model.
        shape: Sizes of a micro-batch on one rank.
    """
    if shape.precision != "fp8":
        return 0
    D = spec.hidden_size
    if spec.moe is None or not spec.is_moe_layer(layer):
        count = (shape.tokens + shape.max_local_count(spec.ffn_hidden_size)) * D
    else:
        rows, F = expert_rows(spec.moe, shape)
        count = (rows + spec.moe.num_experts // shape.layout.ep * F) * D
    return count * (1 if shape.on_cuda else 1 + shape.compute_bytes)


def mlp_backward_bytes(spec: ModelSpec, layer: int, shape: ForwardShape, splits_backward: bool) -> int:
    """Return the peak temporary bytes of a block's MLP or experts in backward, beyond freed bytes.

    They are the gradients of a SwiGLU's two factors, or of a GELU's output; with experts those of the experts' rows,
    before and after sorting.

    Args:
        layer: Index of the block in the model.
        shape: Sizes of a micro-batch on one rank.
        splits_backward: True if backward passes are in two halves. The input of the last product is included then,
            because it is not freed.
    """
    if spec.moe is None or not spec.is_moe_layer(layer):
        return (
            ((2 if spec.activation == "swiglu" else 1) + splits_backward)
            * shape.tokens
            * shape.max_local_count(spec.ffn_hidden_size)
            * shape.compute_bytes
        )
    rows, F = expert_rows(spec.moe, shape)
    return (
        rows * (2 * spec.hidden_size + 3 * F if splits_backward else 2 * max(spec.hidden_size, F)) * shape.compute_bytes
    )


def expert_rows(moe: MoESpec, shape: ForwardShape) -> tuple[int, int]:
    """Return the number of rows that a rank's experts process, and their inner width.

    Ranks have some columns of every expert and all tokens, or some experts and their own tokens."""
    tokens, width = (
        (shape.residual_tokens, moe.expert_ffn_size)
        if shape.layout.ep > 1
        else (shape.tokens, shape.max_local_count(moe.expert_ffn_size))
    )
    return tokens * moe.top_k, width
