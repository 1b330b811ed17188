"""Tensor parallelism (Megatron-LM, arXiv 1909.08053, section 3): ranks share large matrix products.

Products form pairs. The first is sharded by output: each rank has some heads of attention, or columns of the MLP, and
works on these alone. The second is sharded by input, and yields a term of the sum that all ranks need. The forward pass
has one all-reduce after a pair, the backward pass one before it. With sequence parallelism (arXiv 2205.05198, section
4.2.2) a rank has only its share of the tokens between pairs, for norms and residuals. The pair then starts with an
all-gather of tokens and finishes with a reduce-scatter, which together send the same number of bytes.

Embedding and head are sharded by vocabulary, and the loss is computed from each rank's logits; no rank has all logits.
If the ranks do not divide the vocabulary, the last rank has fewer rows, without padding.

The model's modules are unchanged, with smaller tensors; only products are replaced here. Backward passes send the
gradient of a product's input while they compute those of its weights.

Why: `docs/design/decisions/uneven-vocabulary.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.dtypes import at_least_fp32
from phalanx.model.moe import MoE, add_shared
from phalanx.model.part import PartModule, modules_declaring
from phalanx.model.products import ProductLinear, autocast_operands
from phalanx.model.transformer import Transformer
from phalanx.parallel.comm.collectives import ReduceScatter, all_gather
from phalanx.parallel.comm.wait_timer import WaitTimer
from phalanx.parallel.dtensor_shards import rows_per_rank
from phalanx.parallel.pipeline.split_backward import DeferredWeightGrads
from phalanx.parallel.tensor.autograd import (
    AllReduce,
    AllReduceForward,
    ColumnParallelLinear,
    GatherFromSequence,
    ReduceToSequence,
    RowParallelProduct,
    column_parallel,
)
from phalanx.spec.layout import Layout
from phalanx.spec.parts.operations import Dispatch, GatedNorm, GatherTokens, GroupedLinear, Norm, Route


class TensorParallelGroup:
    """The ranks that share matrix products, and their communication.

    Between pairs of products a rank has a residual stream of all tokens, equal on all ranks. With `sequence` it has its
    own tokens: [B, T / ranks, D]."""

    def __init__(
        self, group: dist.ProcessGroup, sequence: bool, vocab: int, deferred_grads: DeferredWeightGrads
    ) -> None:
        """Create the group; `deferred_grads` collects the weight gradients that a pipeline defers."""
        self.group = group
        self.sequence = sequence
        self.deferred_grads = deferred_grads
        self.size = group.size()
        self.rank = group.rank()
        self.first_row = sum(rows_per_rank(vocab, self.size)[: self.rank])
        """First row of the vocabulary on this rank."""
        self.comm_wait = WaitTimer()

    def gather_tokens(self, x: Tensor) -> Tensor:
        """Return the residual stream, or its gradient, of all tokens."""
        return self.start_gather_tokens(x)()

    def reduce_tokens(self, term: Tensor) -> Tensor:
        """Return the sum over ranks of a term for all tokens, as tokens of the residual stream."""
        return self.start_reduce_tokens(term)()

    def start_gather_tokens(self, x: Tensor) -> Callable[[], Tensor]:
        """Start `gather_tokens`; the returned function finishes it."""
        return self.start_all_gather(x, axis=1) if self.sequence else lambda: x

    def start_reduce_tokens(self, term: Tensor) -> Callable[[], Tensor]:
        """Start `reduce_tokens`, which may write into `term`; the returned function finishes it."""
        if self.sequence:
            return self.start_reduce_scatter(term, axis=1)
        term = term.contiguous()
        work = dist.all_reduce(term, group=self.group, async_op=True)

        def finish() -> Tensor:
            self.wait(work)
            return term

        return finish

    def start_all_gather(self, x: Tensor, axis: int) -> Callable[[], Tensor]:
        """Start to concatenate all ranks' `x` along an axis; the returned function finishes it."""
        gathered = x.new_empty(self.size, *x.shape)
        work = all_gather(gathered.flatten(0, 1), x.contiguous(), group=self.group, async_op=True)

        def finish() -> Tensor:
            self.wait(work)
            return gathered.movedim(0, axis).flatten(axis, axis + 1)

        return finish

    def start_reduce_scatter(self, term: Tensor, axis: int) -> Callable[[], Tensor]:
        """Start to sum the ranks' terms and scatter them along an axis; the returned function finishes it."""
        parts = term.unflatten(axis, (self.size, -1)).movedim(axis, 0).contiguous()
        local_shard = torch.empty_like(parts[0])
        scatter = ReduceScatter(parts.view(self.size, -1), local_shard.view(-1), self.group, comm_wait=self.comm_wait)

        def finish() -> Tensor:
            scatter.wait()
            return local_shard

        return finish

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """All-reduce a tensor in place, and return it."""
        self.wait(dist.all_reduce(x, op, group=self.group, async_op=True))
        return x

    def residual_shape(self, tokens: torch.Size) -> tuple[int, ...]:
        """Return the shape of the residual stream without its width, for a micro-batch of shape `tokens`."""
        rows, count = tokens
        return rows, count // self.size if self.sequence else count

    @contextmanager
    def whole_rows(self) -> Iterator[None]:
        """Let forward passes keep all tokens on each rank."""
        sequence, self.sequence = self.sequence, False
        try:
            yield
        finally:
            self.sequence = sequence

    def wait(self, work: dist.Work | None) -> None:
        """Wait for pending communication, if any."""
        with self.comm_wait.measure():
            if work is not None:
                work.wait()


# -- the parts of a model ----------------------------------------------------------------------------------------------


def apply_tensor_parallel(model: Transformer, tp: TensorParallelGroup, layout: Layout) -> None:
    """Make a model with sharded tensors (`parameter_sharding.py`) compute with the ranks of the group."""
    for module in model.modules():
        if isinstance(module, PartModule):
            _share_products(module, tp)
    for part in modules_declaring(model, GatherTokens):
        part.gather_tokens = partial(_gather_tokens, tp)
    for mixture in modules_declaring(model, Dispatch) if layout.ep == 1 else ():
        mixture.mix = partial(_mix_expert_shards, tp)
        mixture.experts.output_bias_share = 1 / tp.size
    for router in modules_declaring(model, Route) if tp.sequence else ():
        router.sum_counts.append(partial(_sum_over_tokens, tp))
    _share_norms(model, tp, layout)
    model.logits = partial(_local_logits, tp)
    if hasattr(model, "embedding"):
        model.embedding.look_up = partial(_embed_tokens, tp)
    if hasattr(model, "per_layer_inputs"):
        model.per_layer_inputs.embedding.look_up = partial(_embed_tokens, tp)
    if tp.sequence:
        _apply_sequence_parallel(model, tp)


def _gather_tokens(tp: TensorParallelGroup, x: Tensor) -> Tensor:
    """Return a value of all tokens, of which each rank uses it for its own heads."""
    return cast(Tensor, GatherFromSequence.apply(x, tp))


def _share_products(module: PartModule, tp: TensorParallelGroup) -> None:
    """Make pairs of products compute with the shards of all ranks."""
    for linear in module.part.linears:
        if isinstance(linear, GroupedLinear):
            continue
        _share_dropout(getattr(module, linear.name), linear.role == "row", tp)
        if linear.role == "column":
            module.multiply_columns = partial(column_parallel, tp)
        elif linear.role == "row":
            layer = getattr(module, linear.name)
            layer.product = RowParallelProduct(tp.deferred_grads.defer_or_compute, layer.product.linear, tp=tp)


def _share_dropout(layer: ProductLinear, is_row: bool, tp: TensorParallelGroup) -> None:
    """Let a rank drop those of its own tokens, or columns, of an adapter's input that one process would drop."""
    if layer.adapter is not None and layer.adapter.dropout is not None:
        layer.adapter.dropout.rank = tp.rank
        if is_row:
            layer.adapter.dropout.first_column = sum(rows_per_rank(layer.in_features, tp.size)[: tp.rank])


def _share_norms(model: Transformer, tp: TensorParallelGroup, layout: Layout) -> None:
    """Make the norms of vectors that ranks share sum their squares. With gathered heads, a rank has those of all."""
    for module in model.modules():
        if isinstance(module, PartModule):
            for operation in module.part.operations:
                if not isinstance(operation, Norm) or not operation.crosses_ranks:
                    continue
                norm = getattr(module, operation.name)
                if isinstance(operation, GatedNorm):
                    norm.sum_over_ranks = tp.all_reduce
                elif layout.tp_attention == "split":
                    norm.normalize = partial(_norm_across_heads, tp)


def _apply_sequence_parallel(model: Transformer, tp: TensorParallelGroup) -> None:
    """Make positions and the auxiliary loss compute with a part of the tokens on each rank."""
    if hasattr(model, "positions"):
        model.positions.look_up = partial(_embed_positions, tp)
    model.local_positions = partial(_attended_indices, tp)
    if model.spec.moe:
        model.sum_auxiliary = partial(_sum_auxiliary_loss, tp)


def _local_logits(tp: TensorParallelGroup, x_BTD: Tensor, weight_VD: Tensor) -> Tensor:
    """Return this rank's columns of the logits, [B, T, V / ranks]."""
    (logits,) = ColumnParallelLinear.apply(*autocast_operands(x_BTD, weight_VD), tp, (F.linear,))
    return cast(Tensor, logits)


def _embed_tokens(tp: TensorParallelGroup, tokens_BT: Tensor, weight: Tensor) -> Tensor:
    """Return the embedding of each token from the rank that has its row."""
    row = tokens_BT - tp.first_row
    is_remote = (row < 0) | (row >= len(weight))
    x_BTD = F.embedding(row.masked_fill(is_remote, 0), weight).masked_fill(is_remote[..., None], 0)
    return cast(Tensor, ReduceToSequence.apply(x_BTD, tp))


def _embed_positions(tp: TensorParallelGroup, indices: Tensor, weight: Tensor) -> Tensor:
    """Return the position embeddings of this rank's tokens."""
    return F.embedding(indices.chunk(tp.size, dim=-1)[tp.rank] if tp.sequence else indices, weight)


def _attended_indices(tp: TensorParallelGroup, x_BT: Tensor) -> Tensor:
    """Return the indices of all tokens of a row.

    The input of a stage is a shard of the tokens; the input of an embedding is all token ids."""
    tokens = x_BT.shape[1] * (tp.size if x_BT.is_floating_point() and tp.sequence else 1)
    return torch.arange(tokens, device=x_BT.device)


def _sum_over_tokens(tp: TensorParallelGroup, counts: Tensor) -> Tensor:
    """Sum, in place, counts of a part of the tokens on each rank."""
    return tp.all_reduce(counts) if tp.sequence else counts


def _sum_auxiliary_loss(tp: TensorParallelGroup, auxiliary: Tensor) -> Tensor:
    """Sum the auxiliary loss over ranks, because each rank's routers process some of the tokens."""
    return cast(Tensor, AllReduceForward.apply(auxiliary, tp)) if tp.sequence else auxiliary


def _norm_across_heads(tp: TensorParallelGroup, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return x / rms(x) x weight, where each rank has some of the heads.

    An equal number of ranks has each head."""
    exact = at_least_fp32(x)
    total = cast(Tensor, AllReduce.apply(exact.square().sum(-1, keepdim=True), tp))
    scale = (total / (tp.size * x.shape[-1]) + eps).rsqrt()
    normalized = (exact * scale).to(x.dtype)
    return normalized if weight is None else normalized * weight.to(x.dtype)


def _mix_expert_shards(tp: TensorParallelGroup, moe: MoE, x_BTD: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Apply experts of which each rank has some columns; routing stays in the residual stream's layout."""
    (operand,) = autocast_operands(moe.to_experts(x_BTD))
    operand = GatherFromSequence.apply(operand, tp)
    weights = GatherFromSequence.apply(weights, tp)
    term = moe.apply_experts(operand, weights, tp.gather_tokens(chosen))
    return add_shared(moe, x_BTD, cast(Tensor, ReduceToSequence.apply(term, tp)))
