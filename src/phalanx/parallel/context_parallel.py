"""Context parallelism: ranks share the tokens of every sequence.

All layers but attention work on single tokens; attention needs the keys and values of the other ranks.

ring (Ring Attention, arXiv 2310.01889): ranks exchange keys and values in a ring. Each step's part of the softmax is
merged with the previous parts by its log-sum-exp. A causal row has most work at its end: each rank has one piece from
the front and one from the back (zig-zag), so that all ranks have equal work at every step.

ulysses (DeepSpeed-Ulysses, arXiv 2309.14509): an all-to-all gives each rank all tokens of some heads. A second
all-to-all returns the tokens to their ranks.

Documents do not attend to each other, as without context parallelism.
Shapes: B batch, T tokens of the full row, t = T / ranks, H heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.attention_sinks import add_sinks, sinks_gradient
from phalanx.model.dtypes import at_least_fp32
from phalanx.model.part import Kernel, modules_declaring
from phalanx.model.sequence_context import Documents
from phalanx.model.transformer import Transformer
from phalanx.parallel.block_attention import Ring, find_ring_blocks, load_kernels
from phalanx.parallel.comm.wait_timer import WaitTimer
from phalanx.spec.parts.operations import Core, Route


class ContextParallelGroup:
    """The ranks that share sequences."""

    def __init__(self, group: dist.ProcessGroup, method: str) -> None:
        """Create the group of a method: `method` is ring or ulysses."""
        self.group = group
        self.method = method
        self.size = group.size()
        self.rank = group.rank()
        self.comm_wait = WaitTimer()

    def local_token_indices(self, tokens: int, device: torch.device) -> Tensor:
        """Return the indices [t] of this rank's tokens in a row of `tokens` tokens."""
        return local_token_indices(tokens, self.size, self.rank, self.method, device)

    def send_to_next(self, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Start to send `tensor` to the next rank and to receive from the previous rank.

        Both tensors have the same shape. Returns the receive buffer, and a function that waits for both transfers."""
        received = torch.empty_like(tensor)
        sending = dist.P2POp(dist.isend, tensor, group=self.group, group_peer=(self.rank + 1) % self.size)
        receiving = dist.P2POp(dist.irecv, received, group=self.group, group_peer=(self.rank - 1) % self.size)
        works = dist.batch_isend_irecv([sending, receiving])

        def wait_for_exchange() -> None:
            with self.comm_wait.measure():
                for work in works:
                    work.wait()

        return received, wait_for_exchange

    def all_to_all(self, sent: Tensor) -> Tensor:
        """Send sent[i] to rank i, and return the tensor whose index j was received from rank j."""
        received = torch.empty_like(sent)
        with self.comm_wait.measure():
            dist.all_to_all_single(received, sent, group=self.group)
        return received


def local_token_indices(tokens: int, ranks: int, rank: int, method: str, device: torch.device | None = None) -> Tensor:
    """Return the indices of a rank's tokens in a row.

    With ring, the row has 2 x ranks equal pieces, and the rank has piece `rank` from the front and from the back. With
    ulysses, the tokens of the rank are contiguous."""
    if method == "ulysses":
        return torch.arange(tokens, device=device).chunk(ranks)[rank]
    pieces = torch.arange(tokens, device=device).chunk(2 * ranks)
    return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])


def apply_context_parallel(model: Transformer, cp: ContextParallelGroup) -> None:
    """Make the attention of a model span the tokens of all ranks of the group.

    The model's input is this rank's tokens of every row, with the document starts of the full row."""
    inner = model.local_positions
    model.local_positions = lambda x_BT: _attended_indices(inner, cp, x_BT)
    model.num_context_ranks = cp.size
    if cp.method == "ring":
        model.attention_mask = partial(_build_document_ring, cp)
    for mixer in modules_declaring(model, Core):
        mixer.core = partial(_ring_attention, cp) if cp.method == "ring" else partial(_exchange_heads, mixer.core, cp)
    for router in modules_declaring(model, Route):
        router.sum_counts.append(partial(_sum_counts, cp))


def _attended_indices(inner: Callable[[Tensor], Tensor], cp: ContextParallelGroup, x_BT: Tensor) -> Tensor:
    return cp.local_token_indices(len(inner(x_BT)) * cp.size, x_BT.device)


def _sum_counts(cp: ContextParallelGroup, counts: Tensor) -> Tensor:
    """Sum the counts of the ranks that share sequences, in place."""
    with cp.comm_wait.measure():
        dist.all_reduce(counts, group=cp.group)
    return counts


# -- ulysses -----------------------------------------------------------------------------------------------------------


def _exchange_heads(core: Kernel, cp: ContextParallelGroup, *values_and_mask: Any, **parameters: Any) -> Tensor:
    """Compute the kernel of a mixer with some of the heads of all tokens on each rank, [B, t, H, K].

    Values may have fewer heads than there are ranks, which then have copies."""
    *values, mask = values_and_mask
    values = [x if x.shape[2] >= cp.size else x.repeat_interleave(cp.size // x.shape[2], dim=2) for x in values]
    # Norms may have lifted queries and keys to fp32.
    by_rank = [x.to(values[-1].dtype).unflatten(2, (cp.size, -1)) for x in values]
    packed = torch.cat([x.flatten(3) for x in by_rank], dim=3).movedim(2, 0)
    all_tokens = cast(Tensor, _AllToAll.apply(packed, cp)).movedim(0, 1).flatten(1, 2)
    local_values = all_tokens.split([prod(x.shape[3:]) for x in by_rank], dim=2)
    local_heads = (x.unflatten(2, like.shape[3:]) for x, like in zip(local_values, by_rank, strict=True))
    local_parameters = {
        name: _local_heads(parameter, cp) if isinstance(parameter, Tensor) else parameter
        for name, parameter in parameters.items()
    }
    out = core(*local_heads, mask, **local_parameters)
    out_by_rank = out.unflatten(1, (cp.size, -1)).movedim(1, 0)
    return cast(Tensor, _AllToAll.apply(out_by_rank, cp)).movedim(0, 2).flatten(2, 3)


def _local_heads(parameter: Tensor, cp: ContextParallelGroup) -> Tensor:
    """Return the part of a parameter [H, ...] of this rank's heads; neighbors share one if there are more ranks."""
    heads = len(parameter)
    return parameter.narrow(0, cp.rank * heads // cp.size, max(1, heads // cp.size))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Tensor, cp: ContextParallelGroup) -> Tensor:
        ctx.cp = cp
        return cp.all_to_all(sent.contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.cp.all_to_all(gradient.contiguous()), None


# -- ring --------------------------------------------------------------------------------------------------------------


def _build_document_ring(cp: ContextParallelGroup, documents: Documents, dtype: torch.dtype, head_dim: int) -> Ring:
    return find_ring_blocks(cp.rank, cp.size, documents.starts.shape[1], documents.host_bounds)


def _ring_attention(
    cp: ContextParallelGroup,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: Ring | None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute attention [B, t, H, K] of this rank's tokens.

    Windows are longer than rows, and scores have no cap (`cost.exact.layout_checks.check_divisibility`). Values that
    are narrower are padded."""
    if (width := v.shape[-1]) < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))
        return _ring_attention(cp, q, k, v, ring, window, sinks_H)[..., :width]
    ring = ring or find_ring_blocks(cp.rank, cp.size, q.shape[1] * cp.size)
    q, k = q.to(v.dtype), k.to(v.dtype)  # norms may have lifted them to fp32
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    if q.device.type != "cpu":
        load_kernels(q.shape[1], k.shape[1], q.shape[3], dtype=q.dtype, device=q.device)
    sinks = None if sinks_H is None else sinks_H[:, None]
    return cast(Tensor, _RingAttention.apply(q, k, v, sinks, ring, cp)).transpose(1, 2)


class _RingAttention(torch.autograd.Function):
    """Attention of q [B, H, t, K] to the keys and values of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: Ring, cp: ContextParallelGroup
    ) -> Tensor:
        out = torch.empty_like(q, dtype=at_least_fp32(q[:0]).dtype)
        lse = out.new_empty(q.shape[:3])
        local_kv = torch.stack([k, v])
        kv = local_kv
        for step, blocks in enumerate(ring.steps):
            next_kv, wait_next_kv = cp.send_to_next(kv) if step + 1 < cp.size else (kv, _no_wait)
            for block in blocks:
                block.attend(q, kv, out, lse)
            wait_next_kv()
            kv = next_kv
        add_sinks(out, lse, sinks)
        ctx.ring = ring
        ctx.cp = cp
        out = out.to(q.dtype)
        ctx.save_for_backward(q, local_kv, out, lse, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse, sinks = ctx.saved_tensors
        gradient = gradient.contiguous()
        grad_q = torch.zeros_like(q, dtype=lse.dtype)
        # Gradients follow their keys and values around the ring, and return to their owner one step later.
        grad_kv = torch.zeros_like(kv, dtype=lse.dtype)
        wait_grad_kv: Callable[[], None] = _no_wait
        for step, blocks in enumerate(ctx.ring.steps):
            next_kv, wait_next_kv = ctx.cp.send_to_next(kv) if step + 1 < ctx.cp.size else (kv, _no_wait)
            grads = [block.gradients(gradient, q, kv, out, lse) for block in blocks]
            wait_grad_kv()
            for block, block_grads in zip(blocks, grads, strict=True):
                block.add(block_grads, grad_q, grad_kv)
            wait_next_kv()
            kv = next_kv
            grad_kv, wait_grad_kv = ctx.cp.send_to_next(grad_kv)
        wait_grad_kv()
        grad_kv = grad_kv.to(q.dtype)
        return grad_q.to(q.dtype), *grad_kv, sinks_gradient(gradient, out, lse, sinks), None, None


def _no_wait() -> None:
    """No-op: nothing is pending."""
