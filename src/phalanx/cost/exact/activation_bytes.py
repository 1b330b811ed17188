"""Bytes of the activations of a micro-batch, and at the times of its backward pass."""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.cost.exact.block_moments import NO_GRADIENTS, BlockMoment, BlockMoments, WeightGradients, largest_moment


@dataclass(frozen=True, kw_only=True)
class RunningBlock:
    """Bytes while a block runs backward, and the blocks after it have."""

    moments: BlockMoments
    """Temporary: what exists inside it, with the residual stream's gradient."""
    inside: int = 0
    """Bytes that blocks up to this one have saved, and that it recomputes."""
    saved: int = 0
    """Bytes that blocks up to this one have saved."""
    saved_by_expert_rows: int = 0
    """Bytes that its experts save, without router and dispatch."""
    expert_input_gradient: int = 0
    """Temporary: gradient of the rows of the experts' input."""


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """Bytes between the loss and the backward pass, by part, and at later peaks."""

    inputs: int = 0
    """Tensors that blocks share: indices of tokens and positions, rotary tables, mask if recomputed."""
    checkpoints: int = 0
    """Inputs of the recomputed blocks (full) or attentions (selective) on the device."""
    offloaded: int = 0
    """Inputs of the recomputed blocks in CPU memory; not part of `total`."""
    norms: int = 0
    """Norms of the residual stream. The stream itself is saved only here, as their input."""
    attention: int = 0
    """Projections, norms of queries and keys, and attention itself."""
    mlp: int = 0
    """Dense MLPs."""
    experts: int = 0
    """Routers, routed and shared experts."""
    merge: int = 0
    """Inputs of layers for multi-token prediction, with the embeddings of tokens that these read."""
    tp_boundaries: int = 0
    """Input and output of a pipeline stage that no other operation saves."""
    head_and_loss: int = 0
    """Input of the head, and the gradient of the logits in their place; or the head's gradients (`head_memory`)."""
    weight_copies: int = 0
    """Copies of fp32 weights in bf16 under autocast. They do not grow with the batch."""
    loss: int = 0
    """Temporary: probabilities of a chunk of the rows, at least in fp32 (`head_memory`)."""
    head_gradients: int = 0
    """Temporary: the gradients of the head's weight and input."""
    saved_by_final_norm: int = 0
    """Part of `norms` that is freed with the head."""
    last_block: RunningBlock
    """The last block; `inside` and `saved` are those of all blocks."""
    unequal_blocks: tuple[RunningBlock, ...] = ()
    """Every block, if they are not all like the last one."""
    recomputed: int = 0
    """Peak while a block or attention is recomputed in the backward pass; 0 without recomputation."""
    recomputed_first: int = 0
    """Peak while the first block is recomputed, which is the last recomputation."""
    residual_gradient: int = 0
    """Temporary: gradient of the residual stream between blocks."""
    prefetched: int = 0
    """Temporary: an offloaded input that is copied back to the device one block ahead."""
    prefetch_end: float = 1.0
    """Fraction of the backward pass that has been freed when the last block with a `prefetched` input is recomputed."""
    deferred_weight_grads: int = 0
    """Bytes that a stage saves for a micro-batch between the halves of its backward pass."""
    inside_blocks: int = 0
    """Peak of what is saved within a block when later blocks and the head have deferred their operands."""
    weight_gradient: int = 0
    """Temporary: the largest gradient that a second half adds, beyond the operands that are freed by then."""
    widened_head: int = 0
    """Temporary: the gradient of the head and its new sum, where that becomes fp32, beyond what is freed by then."""
    widened_gradient: int = 0
    """Temporary: the largest gradient that a second half adds to a sum that becomes fp32, with the new sum."""
    layer_input_gradients: int = 0
    """Temporary: gradients of the inputs of layers at the end of the backward pass, with what is saved for them."""
    embedding_gradient: int = 0
    """Temporary: the gradient of the embedding, with which the backward pass of a first stage ends."""

    @property
    def total(self) -> int:
        """Bytes saved at the end of the forward pass and the loss."""
        blocks = (
            self.checkpoints + self.norms + self.attention + self.mlp + self.experts + self.merge + self.tp_boundaries
        )
        return self.inputs + blocks + self.head_and_loss + self.weight_copies

    @property
    def peak(self) -> int:
        """Peak bytes without communication: at the start of the backward pass, or inside a block."""
        within_blocks = max(
            block.inside + max(moment.temporary for moment in (*block.moments.mlp, *block.moments.attention))
            for block in self._running(0.0)
        )
        return max(self.at_backward_start, within_blocks)

    @property
    def at_backward_start(self) -> int:
        """Bytes at the start of the backward pass, with the loss or in the head."""
        return self.total + max(self.loss, self.head_gradients)

    @property
    def exchanged(self) -> int:
        """Largest communication inside a block on a CPU."""
        blocks = self._running(0.0)
        return max(moment.exchanged for block in blocks for moment in (*block.moments.mlp, *block.moments.attention))

    def within_blocks(self, done: float = 0.0, gradients: WeightGradients = NO_GRADIENTS) -> int:
        """Return the bytes inside a block when the fraction `done` of the backward pass has been freed.

        Args:
            done: Fraction of the backward pass that is complete.
            gradients: Bytes of a weight's gradient.
        """
        return max(self.within_mlp(done, gradients), self.within_attention(done, gradients))

    def within_mlp(self, done: float, gradients: WeightGradients) -> int:
        """Return the bytes inside the MLP or experts of a block, with the arguments of `within_blocks`."""
        return max(block.inside + largest_moment(block.moments.mlp, gradients) for block in self._running(done))

    def within_attention(self, done: float, gradients: WeightGradients) -> int:
        """Return the bytes inside the attention of a block, after its MLP, with the arguments of `within_blocks`."""
        with_attention = (block for block in self._running(done) if block.moments.attention)
        return max(
            (block.inside + largest_moment(block.moments.attention, gradients) for block in with_attention), default=0
        )

    def after_experts(self, done: float) -> int:
        """Return the bytes after a block's experts, when the fraction `done` of the backward pass has been freed."""
        return self.residual_gradient + max(
            block.inside - block.saved_by_expert_rows + block.expert_input_gradient for block in self._running(done)
        )

    def within_dispatch(self, done: float) -> int:
        """Return the bytes where the rows of experts return to their tokens: gradients before, in and after it."""
        return self.after_experts(done) + 2 * max(block.expert_input_gradient for block in self._running(done))

    @property
    def mlp_moments(self) -> list[BlockMoment]:
        """Moments inside the MLPs or experts of all blocks."""
        return [moment for block in self._running(0.0) for moment in block.moments.mlp]

    def between_blocks(self, done: float) -> int:
        """Return the bytes between two blocks, when the fraction `done` of the backward pass has been freed."""
        prefetched = self.prefetched if done < 1 else 0
        saved = round((1 - done) * self._saved_in_blocks)
        if self.unequal_blocks and done < 1:
            saved = self._running(done)[-1].saved
        return saved + self.residual_gradient + prefetched

    def _running(self, done: float) -> tuple[RunningBlock, ...]:
        """Return the blocks that have not run backward when the fraction `done` has: equal ones as one block."""
        if self.unequal_blocks:
            count = len(self.unequal_blocks)
            return self.unequal_blocks[: max(1, count - int(done * count + 1e-9))]
        return (replace(self.last_block, inside=self._saved_within_blocks(done)),)

    def _saved_within_blocks(self, done: float) -> int:
        """Return the bytes that are saved or recomputed when the backward pass of a block starts."""
        recomputed = self.recomputed + done * (self.recomputed_first - self.recomputed)
        if self.prefetched and done < 1:  # nothing is freed from block to block
            recomputed = self.recomputed
        return round(max((1 - done) * self._saved_in_blocks, recomputed))

    @property
    def _saved_in_blocks(self) -> int:
        """Part of the total that remains after the head's backward pass."""
        return self.total - self.head_and_loss - self.saved_by_final_norm
