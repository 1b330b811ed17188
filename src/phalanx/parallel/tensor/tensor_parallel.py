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

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.attention import Attention
from phalanx.model.dtypes import at_least_fp32
from phalanx.model.mlp import MLP, SwiGLUMLP
from phalanx.model.moe import MoE, Router
from phalanx.model.norm import RMSNorm
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

    def wait(self, work: dist.Work | None) -> None:
        """Wait for pending communication, if any."""
        with self.comm_wait.measure():
            if work is not None:
                work.wait()


# -- the parts of a model ----------------------------------------------------------------------------------------------


def apply_tensor_parallel(
    model: Transformer, tp: TensorParallelGroup, unsharded_experts: bool, sharded_heads: bool = True
) -> None:
    """Make a model with sharded tensors (`parameter_sharding.py`) compute with the ranks of the group.

    Args:
        model: Model with this rank's shards.
        tp: The ranks with the other shards.
        unsharded_experts: Each expert is on one rank, not sharded.
        sharded_heads: Ranks have different heads; if false, the heads are gathered (`gathered_heads.py`).
    """
    for part in model.modules():
        if isinstance(part, MoE) and unsharded_experts:
            continue
        _parallelize_part(part, tp)
        if isinstance(part, Attention) and part.qk_norm == "full" and sharded_heads:
            part.q_norm.forward = partial(_norm_across_heads, part.q_norm, tp)  # type: ignore[method-assign]
            part.k_norm.forward = partial(_norm_across_heads, part.k_norm, tp)  # type: ignore[method-assign]
    model.logits = partial(_local_logits, tp)  # type: ignore[method-assign]
    if hasattr(model, "embedding"):
        model.embedding.forward = partial(_embed_tokens, model.embedding, tp)  # type: ignore[method-assign]
    if tp.sequence:
        _apply_sequence_parallel(model, tp)


def _parallelize_part(part: nn.Module, tp: TensorParallelGroup) -> None:
    """Make a pair of products, or the experts, compute with the shards of all ranks."""
    if isinstance(part, Attention):
        _shard_first_products(part, tp, ("wq", "wk", "wv"))
        _shard_last_product(part.wo, tp)
    elif isinstance(part, MLP):
        _shard_first_products(part, tp, ("gate", "up") if isinstance(part, SwiGLUMLP) else ("up",))
        _shard_last_product(part.down, tp)
    elif isinstance(part, MoE):
        part.apply_experts = partial(_apply_expert_shards, part.apply_experts, tp)  # type: ignore[method-assign]


def _apply_sequence_parallel(model: Transformer, tp: TensorParallelGroup) -> None:
    """Make routers, positions and the auxiliary loss compute with a part of the tokens on each rank."""
    for part in model.modules():
        if isinstance(part, Router):
            part.tokens_per_expert = partial(_count_choices, part.tokens_per_expert, tp)  # type: ignore[method-assign]
    if hasattr(model, "positions"):
        model.positions.forward = partial(_embed_positions, model.positions, tp)  # type: ignore[method-assign]
    model.local_positions = lambda x_BT: _attended_indices(x_BT, tp)  # type: ignore[method-assign]
    if model.spec.moe:
        model.run_blocks = partial(_sum_auxiliary_loss, model.run_blocks, tp)  # type: ignore[method-assign]


def _shard_first_products(part: Any, tp: TensorParallelGroup, layers: tuple[str, ...]) -> None:
    # Looked up at every call: wrappers of the layers (ZeRO-3, recomputation) may replace them.
    part.project_in = lambda x: column_parallel(x, tp, *(getattr(part, name) for name in layers))


def _shard_last_product(layer: ProductLinear, tp: TensorParallelGroup) -> None:
    layer.product = RowParallelProduct(tp.deferred_grads.defer_or_compute, layer.product.linear, tp=tp)


def _local_logits(tp: TensorParallelGroup, x_BTD: Tensor, weight_VD: Tensor) -> Tensor:
    """Return this rank's columns of the logits, [B, T, V / ranks]."""
    (logits,) = ColumnParallelLinear.apply(*autocast_operands(x_BTD, weight_VD), tp, F.linear)
    return cast(Tensor, logits)


def _embed_tokens(embedding: nn.Embedding, tp: TensorParallelGroup, tokens_BT: Tensor) -> Tensor:
    """Return the embedding of each token from the rank that has its row."""
    row = tokens_BT - tp.first_row
    is_remote = (row < 0) | (row >= len(embedding.weight))
    x_BTD = F.embedding(row.masked_fill(is_remote, 0), embedding.weight).masked_fill(is_remote[..., None], 0)
    return cast(Tensor, ReduceToSequence.apply(x_BTD, tp))


def _embed_positions(positions: nn.Embedding, tp: TensorParallelGroup, indices: Tensor) -> Tensor:
    """Return the position embeddings of this rank's tokens."""
    return F.embedding(indices.chunk(tp.size, dim=-1)[tp.rank], positions.weight)


def _attended_indices(x_BT: Tensor, tp: TensorParallelGroup) -> Tensor:
    """Return the indices of all tokens of a row.

    The input of a stage is a shard of the tokens; the input of an embedding is all token ids."""
    tokens = x_BT.shape[1] * (tp.size if x_BT.is_floating_point() else 1)
    return torch.arange(tokens, device=x_BT.device)


def _sum_auxiliary_loss(
    run_blocks: Callable[..., tuple[Tensor, Tensor]], tp: TensorParallelGroup, *args: Any
) -> tuple[Tensor, Tensor]:
    """Sum the auxiliary loss over ranks, because each rank's routers process some of the tokens."""
    x_BTD, auxiliary = run_blocks(*args)
    return x_BTD, cast(Tensor, AllReduceForward.apply(auxiliary, tp))


def _norm_across_heads(norm: RMSNorm, tp: TensorParallelGroup, x: Tensor) -> Tensor:
    """Return x / rms(x) x weight, where each rank has some of the heads.

    An equal number of ranks has each head."""
    exact = at_least_fp32(x)
    total = cast(Tensor, AllReduce.apply(exact.square().sum(-1, keepdim=True), tp))
    scale = (total / (tp.size * x.shape[-1]) + norm.eps).rsqrt()
    return (exact * scale).to(x.dtype) * norm.weight.to(x.dtype)


def _apply_expert_shards(
    apply_experts: Callable[..., Tensor], tp: TensorParallelGroup, x: Tensor, weights: Tensor, chosen: Tensor
) -> Tensor:
    """Apply experts of which each rank has some columns; routing stays in the residual stream's layout."""
    (x,) = autocast_operands(x)
    x = GatherFromSequence.apply(x, tp)
    weights = GatherFromSequence.apply(weights, tp)
    return cast(Tensor, ReduceToSequence.apply(apply_experts(x, weights, tp.gather_tokens(chosen)), tp))


def _count_choices(count: Callable[..., Tensor], tp: TensorParallelGroup, chosen: Tensor, dtype: torch.dtype) -> Tensor:
    return tp.all_reduce(count(chosen, dtype))
