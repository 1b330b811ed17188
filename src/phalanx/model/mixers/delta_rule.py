"""The gated delta rule in chunks of tokens (Gated Delta Networks, arXiv 2412.06464, section 3.3).

The state of a head is a matrix S. Each token lets it decay, S <- e^g S, corrects what it has stored under the token's
key, S <- S + k (beta (v - S^T k))^T, and reads it, o = S^T q. Tokens of a chunk see the state before the chunk, and by
products of matrices of C x C each other.

Letters of einsum: b batch, g heads of queries and keys, r heads of values for each of them, c tokens of a chunk (2C
with queries and keys), i and j pairs of these, k width of keys, v width of values. Dimension N has the chunks of a
segment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, einsum

from phalanx.model.recomputation import recomputation
from phalanx.spec.parts.scan_segments import Segment


class Inputs(NamedTuple):
    """Inputs of the rule for a segment, or their gradients."""

    qk: Tensor
    """Queries and keys of each chunk, one after the other, [B, N, G, 2C, K]."""
    v: Tensor
    """Values, [B, N, G, R, C, V]."""
    beta: Tensor
    """Share of the stored value that is replaced, [B, N, G, R, C]."""
    g: Tensor
    """Logarithm of the decay, [B, N, G, R, C]."""


class Decays(NamedTuple):
    """Products of the decays between two times of a chunk, 0 where another document starts between them."""

    pairs: Tensor
    """From token j to token i, [B, N, G, R, C, C], 0 for j > i."""
    before: Tensor
    """From the start of the chunk to a token, [B, N, G, R, C]."""
    after: Tensor
    """From a token to the end of the chunk, [B, N, G, R, C]."""
    whole: Tensor
    """Over the whole chunk, [B, N, G, R]."""


def chunk_decays(g: Tensor, segment: Segment, starts_BT: Tensor | None) -> Decays:
    """Return the decays of the chunks of a segment. `starts_BT` are the starts of documents in their rows."""
    total = g.cumsum(-1)
    pairs = (total[..., None] - total[..., None, :]).exp_().tril_()
    before = total.exp()
    after = (total[..., -1:] - total).exp_()
    whole = before[..., -1]
    if starts_BT is not None:
        starts = starts_BT[:, segment.start : segment.stop].unflatten(1, (segment.chunks, -1))
        first = torch.arange(segment.start, segment.stop, segment.chunk, device=starts.device)
        is_older = (starts < first[:, None])[:, :, None, None]
        before = before * is_older
        whole = whole * is_older[..., -1]
        after.mul_((starts == starts[..., -1:])[:, :, None, None])
        pairs.mul_((starts[..., None] == starts[..., None, :])[:, :, None, None])
    return Decays(pairs, before, after, whole)


class Step(NamedTuple):
    """A chunk's effect on the state before it."""

    state: Tensor
    """The state, [B, G, K, R, V]."""
    read_q: Tensor
    """S^T q, [B, G, R, C, V]."""
    read_k: Tensor
    """S^T k."""
    errors: Tensor
    """Values less what the state has in their place."""
    written: Tensor
    """Values that are stored under the keys."""


class Rule:
    """The rule on the chunks of a segment, of which the products that do not need the state are computed at once."""

    def __init__(self, inputs: Inputs, decays: Decays) -> None:
        self.inputs = inputs
        self.decays = decays
        self.chunk = inputs.v.shape[-2]
        self.keys = inputs.qk[..., self.chunk :, :]
        scores = (inputs.qk @ self.keys.mT).unsqueeze(3)
        self.weights = scores[..., : self.chunk, :] * decays.pairs
        """Weights of the tokens in each other's output, [B, N, G, R, C, C]."""
        self.overlaps = scores[..., self.chunk :, :] * decays.pairs
        """Products of keys with those of earlier tokens, as far as these have not decayed."""
        identity = torch.eye(self.chunk, dtype=scores.dtype, device=scores.device).expand_as(self.overlaps)
        lower = inputs.beta[..., None] * self.overlaps
        self.inverse = torch.linalg.solve_triangular(lower, identity, upper=False, unitriangular=True)
        """(1 + A)^-1, where A has the elements of beta overlaps below the diagonal."""

    def update(self, n: int, state: Tensor) -> tuple[Step, Tensor]:
        """Return what chunk n does to the state, and the state after it."""
        before, after, whole = (decay[:, n, ..., None] for decay in self.decays[1:])
        read_q, read_k = einsum("bgck,bgkrv->bgrcv", self.inputs.qk[:, n], state).chunk(2, dim=-2)
        errors = self.inputs.v[:, n] - read_k * before
        written = self.inverse[:, n] @ (errors * self.inputs.beta[:, n, ..., None])
        stored = einsum("bgck,bgrcv->bgkrv", self.keys[:, n], written * after)
        return Step(state, read_q, read_k, errors, written), stored + state * whole[:, :, None]

    def _steps(self, state: Tensor) -> Iterator[Step]:
        for n in range(self.inputs.v.shape[1]):
            step, state = self.update(n, state)
            yield step

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs, [B, N, G, R, C, V], and the state after the segment."""
        out = torch.empty_like(self.inputs.v)
        for n in range(out.shape[1]):
            step, state = self.update(n, state)
            out[:, n] = self.weights[:, n] @ step.written + step.read_q * self.decays.before[:, n, ..., None]
        return out, state

    def backward(self, state: Tensor, grad_out: Tensor, grad_state: Tensor) -> tuple[Inputs, Tensor]:
        """Return the gradients of the inputs and of the state before the segment, given that of the state after it."""
        with recomputation():
            steps = list(self._steps(state))
        grads = _Gradients(
            Inputs(*map(torch.empty_like, self.inputs)),
            *(torch.empty_like(x) for x in (self.weights, self.overlaps, *self.decays[1:])),
        )
        for n in reversed(range(len(steps))):
            grad_state = self._update_backward(n, steps.pop(), grad_out[:, n], grad_state, grads)
        return self._scores_backward(grads), grad_state

    def _update_backward(self, n: int, step: Step, grad_out: Tensor, grad_state: Tensor, grads: _Gradients) -> Tensor:
        """Write the gradients of chunk n, and return that of the state before it."""
        state, read_q, read_k, errors, written = step
        before, after, whole = (decay[:, n, ..., None] for decay in self.decays[1:])
        # The state after the chunk is k (after written)^T + whole S.
        grad_stored = einsum("bgck,bgkrv->bgrcv", self.keys[:, n], grad_state)
        grad_keys = einsum("bgrcv,bgkrv->bgck", written * after, grad_state)
        grads.after[:, n] = (grad_stored * written).sum(-1)
        grads.whole[:, n] = (grad_state * state).sum((2, 4))
        # The output is weights written + before S^T q.
        grad_written = (grad_stored.mul_(after)).add_(self.weights[:, n].mT @ grad_out)
        grads.weights[:, n] = grad_out @ written.mT
        # Written is (1 + A)^-1 beta errors, and errors are v - before S^T k.
        grad_scaled = self.inverse[:, n].mT @ grad_written
        grads.lower[:, n] = grad_scaled @ written.mT
        grads.inputs.beta[:, n] = (grad_scaled * errors).sum(-1)
        grad_errors = torch.mul(grad_scaled, self.inputs.beta[:, n, ..., None], out=grad_scaled)
        grads.inputs.v[:, n] = grad_errors
        grads.before[:, n] = (grad_out * read_q - grad_errors * read_k).sum(-1)
        grad_reads = torch.cat((grad_out, grad_errors.neg_()), dim=-2).mul_(torch.cat((before, before), dim=-2))
        grads.inputs.qk[:, n] = einsum("bgrcv,bgkrv->bgck", grad_reads, state)
        grads.inputs.qk[:, n, :, self.chunk :] += grad_keys
        read = einsum("bgck,bgrcv->bgkrv", self.inputs.qk[:, n], grad_reads)
        return read + grad_state * whole[:, :, None]

    def _scores_backward(self, grads: _Gradients) -> Inputs:
        """Add the gradients by decays and by products of queries and keys; return those of the inputs."""
        qk, _, beta, _ = self.inputs
        grad_lower = grads.lower.neg_().tril_(-1)
        grads.inputs.beta.add_((grad_lower * self.overlaps).sum(-1))
        grad_overlaps = grad_lower.mul_(beta[..., None])
        grad_scores = torch.cat([(grad * self.decays.pairs).sum(3) for grad in (grads.weights, grad_overlaps)], dim=-2)
        grads.inputs.qk.add_(grad_scores @ self.keys)
        grads.inputs.qk[..., self.chunk :, :] += grad_scores.mT @ qk
        # Decays are exponentials of differences between sums of g.
        pairs = grads.weights.mul_(self.weights).addcmul_(grad_overlaps, self.overlaps)
        to_end = grads.after * self.decays.after
        grad_total = pairs.sum(-1) - pairs.sum(-2) + grads.before * self.decays.before - to_end
        grad_total[..., -1] += to_end.sum(-1) + grads.whole * self.decays.whole
        torch.sub(grad_total.sum(-1, keepdim=True), grad_total.cumsum(-1), out=grads.inputs.g).add_(grad_total)
        return grads.inputs


class _Gradients(NamedTuple):
    """Gradients of the inputs, and of what is computed of them."""

    inputs: Inputs
    weights: Tensor
    lower: Tensor
    """Gradient of A, less its sign."""
    before: Tensor
    after: Tensor
    whole: Tensor
