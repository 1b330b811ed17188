"""Bytes of the head and the loss: with all logits in memory, or in chunks of tokens.

`cost.exact.activation_memory` adds them, and explains the symbols. In chunks (`parallel.linear_cross_entropy`), the
gradients of the head's input and matrix are computed in the forward pass, and wait for the backward pass."""

from __future__ import annotations

from collections import Counter

from phalanx.cost.exact.forward_shape import INDEX_BYTES, ForwardShape
from phalanx.spec.chunks import loss_chunk_rows
from phalanx.spec.layout import MAX_BF16_SUMS
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.block import residual_stream
from phalanx.spec.parts.model import is_head_trained


def saved_by_head(spec: ModelSpec, shape: ForwardShape) -> Counter[str]:
    """Return the bytes that the head and the loss save: its input and the gradient of the logits, or its gradients."""
    matrix = shape.max_local_count(spec.vocab_size) * spec.hidden_size
    input_bytes = shape.operand_bytes(residual_stream(spec))
    is_trained = is_head_trained(spec)
    if shape.computes_head_gradients(spec):
        gradient_bytes = matrix * shape.residual_bytes if is_trained else 0
        return Counter(head_and_loss=spec.num_logits * (input_bytes + gradient_bytes))
    # Without a cast, layers for multi-token prediction save all inputs of the head but the last.
    num_inputs = (spec.num_logits if shape.autocast else 1) if is_trained else 0
    saved_bytes = num_inputs * input_bytes + spec.num_logits * _logits_bytes(spec, shape, shape.tokens)
    return Counter(head_and_loss=saved_bytes, weight_copies=shape.weight_copies(matrix))


def loss_bytes(spec: ModelSpec, shape: ForwardShape) -> int:
    """Return the temporary bytes of the loss: a chunk's probabilities, which become its gradient, and sums by row."""
    if shape.computes_head_gradients(spec):
        return _chunked_loss_bytes(spec, shape)
    vocab = shape.max_local_count(spec.vocab_size)
    rows = min(shape.tokens, loss_chunk_rows(vocab, on_cuda=shape.on_cuda))
    row_bytes = 5 * shape.high_precision_bytes + 3 * INDEX_BYTES + 2  # two flags
    return rows * vocab * shape.high_precision_bytes + shape.tokens * row_bytes


def head_gradient_bytes(spec: ModelSpec, shape: ForwardShape, splits_backward: bool) -> int:
    """Return the temporary bytes of the head's backward pass; in chunks it is a part of the loss.

    They are the gradients of its weight and input, and what tensor-parallel ranks exchange meanwhile.

    Args:
        shape: Sizes of a micro-batch on one rank.
        splits_backward: True if the gradient of the head's weight is deferred.
    """
    if shape.computes_head_gradients(spec):
        return 0
    computes_gradient = is_head_trained(spec) and not splits_backward
    rows = shape.max_local_count(spec.vocab_size) if computes_gradient else 0
    head_bytes = (rows + shape.tokens) * spec.hidden_size * shape.compute_bytes
    return head_bytes + _head_exchange_bytes(spec, shape)


def widened_head_bytes(spec: ModelSpec, shape: ForwardShape, splits_backward: bool) -> int:
    """Return the bytes of the head's gradient and its new sum, when the sum becomes fp32, beyond what is freed by then.

    Args:
        shape: Sizes of a micro-batch on one rank.
        splits_backward: True if the gradient of the head's weight is deferred, unless it is computed in chunks.
    """
    matrix = shape.max_local_count(spec.vocab_size) * spec.hidden_size
    if not is_head_trained(spec) or (splits_backward and not shape.computes_head_gradients(spec)):
        return 0
    gradient_and_sum = matrix * (shape.compute_bytes + shape.high_precision_bytes)
    return gradient_and_sum - saved_by_head(spec, shape).total()


def _head_exchange_bytes(spec: ModelSpec, shape: ForwardShape) -> int:
    """Return the bytes of the head's sequence-parallel communication in its backward pass.

    They are its input of all ranks, if the matrix is trained, and the received terms of the input's gradient. Tokens
    of several sequences have copies of both in another order. On CUDA the sum follows, in fp32 and cast; on a CPU it is
    allocated before."""
    if not shape.layout.sequence_parallel or shape.tp == 1:
        return 0
    num_buffers = 1 + is_head_trained(spec)
    num_buffers *= 1 if shape.batch == 1 or shape.on_cuda else 2
    all_tokens_bytes = num_buffers * shape.tokens * shape.compute_bytes
    sum_bytes = shape.residual_tokens * (shape.on_cuda * shape.high_precision_bytes + shape.compute_bytes)
    return (all_tokens_bytes + sum_bytes) * spec.hidden_size


def _chunked_loss_bytes(spec: ModelSpec, shape: ForwardShape) -> int:
    """Return the temporary bytes of the loss in chunks.

    They are the head's operands, and a chunk's logits with their loss or with a product of the matrix's gradient. The
    gradient is a sum in fp32 if the matrix is, or if there are many chunks."""
    D = spec.hidden_size
    vocab = shape.max_local_count(spec.vocab_size)
    has_copy = shape.autocast or shape.residual_tokens < shape.tokens
    operand_bytes = (
        shape.residual_tokens * D * shape.residual_bytes  # output of the norm
        + (shape.tokens * D * shape.compute_bytes if has_copy else 0)
        + shape.weight_copies(vocab * D)
        + (shape.tokens - shape.residual_tokens) * D * shape.compute_bytes  # gradients that ranks have not summed
        + shape.tokens * INDEX_BYTES  # targets
        + shape.high_precision_bytes  # the sum of the losses
    )
    rows = shape.logits_rows(spec)
    is_trained = is_head_trained(spec)
    is_cast = is_trained and shape.residual_bytes < 4 and shape.num_logits_chunks(spec) > MAX_BF16_SUMS
    sums_in_fp32 = is_trained and (shape.autocast or is_cast)
    piece_rows = min(vocab, loss_chunk_rows(D, on_cuda=shape.on_cuda)) if sums_in_fp32 else 0
    # A teacher has logits of its own.
    chunk_bytes = (1 + shape.has_teacher) * _logits_bytes(spec, shape, rows) + max(
        _row_loss_bytes(spec, shape, rows), piece_rows * D * shape.compute_bytes
    )
    cast_bytes = vocab * D * shape.residual_bytes if is_cast else 0
    return operand_bytes + cast_bytes + max(chunk_bytes, cast_bytes)


def _logits_bytes(spec: ModelSpec, shape: ForwardShape, rows: int) -> int:
    return rows * shape.max_local_count(spec.vocab_size) * shape.compute_bytes


def _row_loss_bytes(spec: ModelSpec, shape: ForwardShape, rows: int) -> int:
    """Return the temporary bytes of the loss of a chunk: numbers of its rows, and probabilities of some of them."""
    vocab = shape.max_local_count(spec.vocab_size)
    row_bytes = 3 * shape.high_precision_bytes + INDEX_BYTES + 2  # two flags
    # With a teacher there are five sums of each row, and three chunks of numbers of some rows.
    row_bytes += 5 * shape.high_precision_bytes * shape.has_teacher
    probabilities = 3 if shape.has_teacher else 1
    probability_row_bytes = (probabilities * vocab + 2) * shape.high_precision_bytes + INDEX_BYTES
    return rows * row_bytes + min(rows, loss_chunk_rows(vocab, on_cuda=shape.on_cuda)) * probability_row_bytes
