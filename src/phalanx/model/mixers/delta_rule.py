"""The gated delta rule in chunks of tokens (Gated Delta Networks, arXiv 2412.06464, section 3.3).

The state of a head is a matrix S. Each token lets it decay, S <- e^g S, corrects what it has stored under the token's
key, S <- S + k (beta (v - S^T k))^T, and reads it, o = S^T q. Tokens of a chunk see the state before the chunk, and by
products of matrices of C x C each other. The decay is that of a head, or of each channel of its keys (Kimi Linear,
arXiv 2510.26692, section 3).

Letters of einsum: b batch, g heads of queries and keys, r heads of values for each of them, c tokens of a chunk (2C
with queries and keys), k width of keys, v width of values. Dimension N has the chunks of a segment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, einsum

from phalanx.model.uncounted_products import uncounted_products
from phalanx.spec.parts.scan_segments import Segment


class Inputs(NamedTuple):
    """Inputs of the rule for a segment, or their gradients."""

    qk: Tensor
    """Queries and keys of each chunk, one after the other, [B, N, G, 2C, K]."""
    v: Tensor
    """Values, [B, N, G, R, C, V]."""
    beta: Tensor
    """Share of the stored value that is replaced, [B, N, G, R, C, 1]."""
    g: Tensor
    """Logarithm of the decay, of a head [B, N, G, R, C, 1], or of each channel of its keys [B, N, G, 1, C, K]."""


class Visible(NamedTuple):
    """Masks of pairs of times of a chunk between which no document starts."""

    before: Tensor
    """From the start of the chunk to a token, [B, N, 1, C, 1]."""
    after: Tensor
    """From a token to the end of the chunk, [B, N, 1, C, 1]."""
    pairs: Tensor
    """From an earlier token to a later one, [B, N, 1, C, C]."""


def visible_tokens(segment: Segment, starts_BT: Tensor | None) -> Visible | None:
    """Return what is in one document, given the starts of documents in their rows; None if all is."""
    if starts_BT is None:
        return None
    starts = starts_BT[:, segment.start : segment.stop].unflatten(1, (segment.chunks, 1, -1))[..., None]
    first = torch.arange(segment.start, segment.stop, segment.chunk, device=starts.device)
    return Visible(starts < first[:, None, None, None], starts == starts[..., -1:, :], starts == starts.mT)


class Step(NamedTuple):
    """A chunk's effect on the state before it."""

    state: Tensor
    """The state, [B, G, K, R, V]."""
    reads: Tensor
    """Values that queries and keys read from it, one after the other, [B, G, R, 2C, V]."""
    errors: Tensor
    """Values less what the state has in their place."""
    written: Tensor
    """Values that are stored under the keys."""


class Gradients(NamedTuple):
    """Gradients of the inputs, and of what is computed of them."""

    inputs: Inputs
    """Gradients of inputs; of queries and keys as readers only, until the others are added."""
    stored: Tensor
    """Gradients of keys as those under which values are stored, [B, N, G, C, K]."""
    scores: Tensor
    """Gradients of weights, and of A, [2, B, N, G, R, C, C]."""


class Rule:
    """The rule on the chunks of a segment, of which the products that do not need the state are computed at once.

    Subclasses let states and pairs of tokens decay."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.chunk = inputs.v.shape[-2]
        self.keys = inputs.qk[..., self.chunk :, :]
        self.weights, self.overlaps = self.decayed_scores()
        identity = torch.eye(self.chunk, dtype=inputs.v.dtype, device=inputs.v.device).expand_as(self.overlaps)
        self.inverse = torch.linalg.solve_triangular(
            inputs.beta * self.overlaps, identity, upper=False, unitriangular=True
        )
        """(1 + A)^-1, where A has the elements of beta overlaps below the diagonal."""

    def decayed_scores(self) -> tuple[Tensor, Tensor]:
        """Return products of queries and keys, and of keys with each other, as far as these have decayed.

        The former are weights of the tokens in each other's output; the latter are overlaps. Both are
        [B, N, G, R, C, C]; the overlaps of a token and later ones, or itself, are not read."""
        raise NotImplementedError

    def read(self, n: int, state: Tensor) -> Tensor:
        """Return what queries and keys of chunk n read of the state before the chunk, [B, G, R, 2C, V]."""
        raise NotImplementedError

    def store(self, n: int, state: Tensor, written: Tensor) -> Tensor:
        """Return the state after chunk n."""
        raise NotImplementedError

    def store_backward(self, n: int, step: Step, grad_state: Tensor, grads: Gradients) -> tuple[Tensor, Tensor]:
        """Return the gradients of what is written, and of the decayed state; write those of keys and decays."""
        raise NotImplementedError

    def read_backward(self, n: int, step: Step, grad_reads: Tensor, grads: Gradients) -> Tensor:
        """Return the gradient of the state; write those of queries, keys and decays. `grad_reads` may change."""
        raise NotImplementedError

    def scores_backward(self, grads: Gradients) -> None:
        """Add the gradients of queries, keys and sums of g by the scores. `grads.scores` may change."""
        raise NotImplementedError

    def update(self, n: int, state: Tensor) -> tuple[Step, Tensor]:
        """Return what chunk n does to the state, and the state after it."""
        reads = self.read(n, state)
        errors = self.inputs.v[:, n] - reads[..., self.chunk :, :]
        written = self.inverse[:, n] @ (errors * self.inputs.beta[:, n])
        return Step(state, reads, errors, written), self.store(n, state, written)

    def _steps(self, state: Tensor) -> Iterator[Step]:
        for n in range(self.inputs.v.shape[1]):
            step, state = self.update(n, state)
            yield step

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs, [B, N, G, R, C, V], and the state after the segment."""
        out = torch.empty_like(self.inputs.v)
        for n in range(out.shape[1]):
            step, state = self.update(n, state)
            out[:, n] = self.weights[:, n] @ step.written + step.reads[..., : self.chunk, :]
        return out, state

    def backward(self, state: Tensor, grad_out: Tensor, grad_state: Tensor) -> tuple[Inputs, Tensor]:
        """Return the gradients of the inputs and of the state before the segment, given that of the state after it."""
        with uncounted_products():
            steps = list(self._steps(state))
        grads = Gradients(
            Inputs(*map(torch.empty_like, self.inputs)),
            torch.empty_like(self.keys),
            self.weights.new_empty((2, *self.weights.shape)),
        )
        for n in reversed(range(len(steps))):
            grad_state = self._update_backward(n, steps.pop(), grad_out[:, n], grad_state, grads)
        # A is beta overlaps, and the gradient of (1 + A)^-1 has a minus.
        grad_lower = grads.scores[1].neg_().tril_(-1)
        grads.inputs.beta.add_((grad_lower * self.overlaps).sum(-1, keepdim=True))
        grad_lower.mul_(self.inputs.beta)
        self.scores_backward(grads)
        grads.inputs.qk[..., self.chunk :, :] += grads.stored
        # So far g has the gradients of its sums.
        sums = grads.inputs.g
        sums.add_(sums.sum(-2, keepdim=True) - sums.cumsum(-2))
        return grads.inputs, grad_state

    def _update_backward(self, n: int, step: Step, grad_out: Tensor, grad_state: Tensor, grads: Gradients) -> Tensor:
        """Write the gradients of chunk n, and return that of the state before it."""
        grad_written, grad_state = self.store_backward(n, step, grad_state, grads)
        # The output is weights written + S^T q.
        grad_written.add_(self.weights[:, n].mT @ grad_out)
        grads.scores[0, :, n] = grad_out @ step.written.mT
        # Written is (1 + A)^-1 beta errors, and errors are v - S^T k.
        grad_scaled = self.inverse[:, n].mT @ grad_written
        grads.scores[1, :, n] = grad_scaled @ step.written.mT
        grads.inputs.beta[:, n] = (grad_scaled * step.errors).sum(-1, keepdim=True)
        grad_errors = grad_scaled.mul_(self.inputs.beta[:, n])
        grads.inputs.v[:, n] = grad_errors
        grad_reads = torch.cat((grad_out, grad_errors.neg_()), dim=-2)
        return self.read_backward(n, step, grad_reads, grads).add_(grad_state)


class HeadRule(Rule):
    """The rule with a decay of heads, which what is read and written takes."""

    def __init__(self, inputs: Inputs, visible: Visible | None) -> None:
        total = inputs.g.cumsum(-2)
        self.pairs = (total - total.mT).exp_().tril_()
        """Decays from token j to token i, [B, N, G, R, C, C], 0 for j > i or in another document."""
        self.before = total.exp()
        """Decays from the start of the chunk to a token, [B, N, G, R, C, 1]."""
        self.after = (total[..., -1:, :] - total).exp_()
        """Decays from a token to the end of the chunk."""
        if visible is not None:
            for decays, mask in zip((self.before, self.after, self.pairs), visible, strict=True):
                decays.mul_(mask[:, :, None])
        super().__init__(inputs)

    def decayed_scores(self) -> tuple[Tensor, Tensor]:
        """Multiply scores, which are those of all heads of values, by the decays of these."""
        scores = (self.inputs.qk @ self.keys.mT).unsqueeze(3)
        return scores[..., : self.chunk, :] * self.pairs, scores[..., self.chunk :, :] * self.pairs

    def read(self, n: int, state: Tensor) -> Tensor:
        """Let decay what is read."""
        reads = einsum("bgck,bgkrv->bgrcv", self.inputs.qk[:, n], state)
        for half in reads.chunk(2, dim=-2):
            half.mul_(self.before[:, n])
        return reads

    def store(self, n: int, state: Tensor, written: Tensor) -> Tensor:
        """Let decay what is written."""
        stored = einsum("bgck,bgrcv->bgkrv", self.keys[:, n], written * self.after[:, n])
        return stored.addcmul_(state, self._whole(n))

    def _whole(self, n: int) -> Tensor:
        """Return the decay over chunk n, [B, G, 1, R, 1]."""
        return self.before[:, n, :, None, :, -1]

    def store_backward(self, n: int, step: Step, grad_state: Tensor, grads: Gradients) -> tuple[Tensor, Tensor]:
        """Give sums of g the products of what decays and its gradient."""
        grads.stored[:, n] = einsum("bgrcv,bgkrv->bgck", step.written * self.after[:, n], grad_state)
        grad_written = einsum("bgck,bgkrv->bgrcv", self.keys[:, n], grad_state).mul_(self.after[:, n])
        grad_state = grad_state * self._whole(n)
        to_end = (grad_written * step.written).sum(-1, keepdim=True)
        grads.inputs.g[:, n] = -to_end
        grads.inputs.g[:, n, ..., -1, 0] += to_end.sum((-1, -2)) + (grad_state * step.state).sum((2, 4))
        return grad_written, grad_state

    def read_backward(self, n: int, step: Step, grad_reads: Tensor, grads: Gradients) -> Tensor:
        """Give sums of g the products of what is read and its gradient."""
        for grad, read in zip(grad_reads.chunk(2, dim=-2), step.reads.chunk(2, dim=-2), strict=True):
            grads.inputs.g[:, n] += (grad * read).sum(-1, keepdim=True)
            grad.mul_(self.before[:, n])
        grads.inputs.qk[:, n] = einsum("bgrcv,bgkrv->bgck", grad_reads, step.state)
        return einsum("bgck,bgrcv->bgkrv", self.inputs.qk[:, n], grad_reads)

    def scores_backward(self, grads: Gradients) -> None:
        """Add the gradients by decays and by products of queries and keys."""
        grad_scores = torch.cat([(grad * self.pairs).sum(3) for grad in grads.scores], dim=-2)
        grads.inputs.qk.add_(grad_scores @ self.keys)
        grads.stored.add_(grad_scores.mT @ self.inputs.qk)
        grad_weights, grad_overlaps = grads.scores
        pairs = grad_weights.mul_(self.weights).addcmul_(grad_overlaps, self.overlaps)
        grads.inputs.g.add_(pairs.sum(-1, keepdim=True) - pairs.sum(-2)[..., None])


class Split(NamedTuple):
    """Neighboring intervals of tokens, the later of which see the earlier ones."""

    start: int
    blocks: int
    """Number of pairs of intervals, which follow one another."""
    earlier: int
    """Tokens of the earlier interval."""
    later: int

    def intervals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the earlier and the later intervals, [..., blocks, J, K] and [..., blocks, I, K], of [..., C, K]."""
        both = self.earlier + self.later
        blocks = x[..., self.start : self.start + self.blocks * both, :].unflatten(-2, (self.blocks, both))
        return blocks[..., : self.earlier, :], blocks[..., self.earlier :, :]

    def pairs(self, scores: Tensor) -> Tensor:
        """Return those of later and earlier tokens, [..., blocks, I, J], of [..., C, C]."""
        both = self.earlier + self.later
        tokens = slice(self.start, self.start + self.blocks * both)
        blocks = scores[..., tokens, tokens].unflatten(-1, (self.blocks, both)).unflatten(-3, (self.blocks, both))
        return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)[..., self.earlier :, : self.earlier]


def splits(chunk: int) -> Iterator[Split]:
    """Yield intervals of which each pair of different tokens of a chunk is in one pair."""
    half = 1
    while half < chunk:
        blocks, rest = divmod(chunk, 2 * half)
        if blocks:
            yield Split(0, blocks, half, half)
        if rest > half:
            yield Split(chunk - rest, 1, half, rest - half)
        half *= 2


class ChannelRule(Rule):
    """The rule with a decay of each channel of keys, which queries and keys take. Each key has one head of values.

    Decays of pairs are no products of a factor of each token, which would overflow. But they are the product of two
    decays, to and from a time between both tokens: so the chunk is halved again and again, and the decays of each pair
    of halves are to and from the border (compare Gated Linear Attention, arXiv 2312.06635, section 4.3)."""

    def __init__(self, inputs: Inputs, visible: Visible | None) -> None:
        self.total = inputs.g.squeeze(3).cumsum(-2)
        self.visible = visible
        self.before = self.total.exp()
        """Decays from the start of the chunk to a token, [B, N, G, C, K], 0 if another document starts there."""
        self.after = (self.total[..., -1:, :] - self.total).exp_()
        """Decays from a token to the end of the chunk."""
        if visible is not None:
            self.before.mul_(visible.before)
            self.after.mul_(visible.after)
        super().__init__(inputs)

    def _decays_of_halves(self, split: Split) -> tuple[Tensor, Tensor]:
        """Return the decays from earlier tokens to the border, and from there to later ones."""
        earlier, later = split.intervals(self.total)
        border = earlier[..., -1:, :]
        return (border - earlier).exp_(), (later - border).exp_()

    def decayed_scores(self) -> tuple[Tensor, Tensor]:
        """Compute the scores of halves with each other; those of a token with itself do not decay."""
        queries_and_keys = _apart(self.inputs.qk)
        scores = self.total.new_zeros((*queries_and_keys.shape[:-1], self.chunk))
        for split in splits(self.chunk):
            from_earlier, to_later = self._decays_of_halves(split)
            keys = split.intervals(self.keys)[0] * from_earlier
            readers = _join(split.intervals(queries_and_keys)[1] * to_later)
            split.pairs(scores).copy_(_apart(readers @ keys.mT))
        queries = queries_and_keys[0]
        scores[0].diagonal(dim1=-2, dim2=-1).copy_((queries * self.keys).sum(-1))
        if self.visible is not None:
            scores.mul_(self.visible.pairs)
        weights, overlaps = scores.unsqueeze(4)
        return weights, overlaps

    def read(self, n: int, state: Tensor) -> Tensor:
        """Read with decayed queries and keys."""
        readers = self.inputs.qk[:, n] * self.before[:, n].repeat(1, 1, 2, 1)
        return einsum("bgck,bgkrv->bgrcv", readers, state)

    def store(self, n: int, state: Tensor, written: Tensor) -> Tensor:
        """Store under decayed keys."""
        stored = einsum("bgck,bgrcv->bgkrv", self.keys[:, n] * self.after[:, n], written)
        return stored.addcmul_(state, self._whole(n))

    def _whole(self, n: int) -> Tensor:
        """Return the decays over chunk n, [B, G, K, 1, 1]."""
        return self.before[:, n, :, -1, :, None, None]

    def store_backward(self, n: int, step: Step, grad_state: Tensor, grads: Gradients) -> tuple[Tensor, Tensor]:
        """Give the last sum of g the products of what decays to the end and its gradient."""
        keys = self.keys[:, n]
        after = self.after[:, n]
        grads.stored[:, n] = einsum("bgrcv,bgkrv->bgck", step.written, grad_state).mul_(after)
        grad_written = einsum("bgck,bgkrv->bgrcv", keys * after, grad_state)
        grad_state = grad_state * self._whole(n)
        grads.inputs.g[:, n] = 0
        grads.inputs.g[:, n, :, 0, -1] = (grads.stored[:, n] * keys).sum(-2) + (grad_state * step.state).sum((-1, -2))
        return grad_written, grad_state

    def read_backward(self, n: int, step: Step, grad_reads: Tensor, grads: Gradients) -> Tensor:
        """Give queries and keys the gradients of decayed ones, times the decay."""
        before = self.before[:, n].repeat(1, 1, 2, 1)
        grads.inputs.qk[:, n] = einsum("bgrcv,bgkrv->bgck", grad_reads, step.state).mul_(before)
        return einsum("bgck,bgrcv->bgkrv", self.inputs.qk[:, n] * before, grad_reads)

    def scores_backward(self, grads: Gradients) -> None:
        """Add the gradients of halves. Sums of g have the products of what decays and its gradient."""
        grad_scores = grads.scores.squeeze(4)
        if self.visible is not None:
            grad_scores.mul_(self.visible.pairs)
        queries_and_keys = _apart(self.inputs.qk)
        grad_readers = _apart(grads.inputs.qk)
        for split in splits(self.chunk):
            from_earlier, to_later = self._decays_of_halves(split)
            grad_pairs = _join(split.pairs(grad_scores))
            keys = split.intervals(self.keys)[0] * from_earlier
            split.intervals(grad_readers)[1].addcmul_(_apart(grad_pairs @ keys), to_later)
            readers = _join(split.intervals(queries_and_keys)[1] * to_later)
            split.intervals(grads.stored)[0].addcmul_(grad_pairs.mT @ readers, from_earlier)
        sums = grads.inputs.g.squeeze(3)
        for x, grad in zip(queries_and_keys, grad_readers, strict=True):
            sums.addcmul_(x, grad)
        sums.addcmul_(self.keys, grads.stored, value=-1)
        grad_self = grad_scores[0].diagonal(dim1=-2, dim2=-1)[..., None]
        grad_readers[0].addcmul_(grad_self, self.keys)
        grads.stored.addcmul_(grad_self, queries_and_keys[0])


def _apart(qk: Tensor) -> Tensor:
    """Return queries and keys, [2, ..., C, K], of both one after the other, [..., 2C, K]."""
    return qk.unflatten(-2, (2, -1)).movedim(-3, 0)


def _join(queries_and_keys: Tensor) -> Tensor:
    """Return queries and keys one after the other, [..., 2C, K], of [2, ..., C, K]."""
    return queries_and_keys.movedim(0, -3).flatten(-3, -2)
