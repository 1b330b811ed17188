"""What each part of a model's forward pass keeps for the backward pass, in bytes: the counts behind
`cost.activations`, whose symbols these are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from phalanx.cost.precision import COMPUTE_BYTES, Precision
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec, MoESpec

INDEX = 8
"""Bytes of a token, target, position or place in an order: int64."""


@dataclass(frozen=True)
class ForwardShape:
    """Sizes of a forward pass on one rank; those of numbers are in bytes."""

    batch: int
    sequence: int
    """Of whole rows, of which context-parallel ranks have a share."""
    precision: Precision
    layout: Layout
    autocast: bool
    masked: bool

    @property
    def tp(self) -> int:
        return self.layout.tp

    @property
    def tokens(self) -> int:
        """N: those that products and attention are given."""
        return self.batch * self.sequence // self.layout.cp

    @property
    def residual_tokens(self) -> int:
        """Tokens of the residual stream on this rank."""
        return self.tokens // self.tp if self.layout.sequence_parallel else self.tokens

    def largest_share(self, count: int) -> int:
        """Of heads, columns or rows of the vocabulary, those of the rank that has most."""
        return max(1, -(-count // self.tp))

    @property
    def compute_bytes(self) -> int:
        """What matrix products compute in."""
        return COMPUTE_BYTES[self.precision]

    @property
    def high_precision_bytes(self) -> int:
        """What asks for accuracy: norms, softmax, rotary tables, the router. At least fp32."""
        return max(4, self.compute_bytes)

    @property
    def residual_bytes(self) -> int:
        """The residual stream, which autocast leaves in the parameters' fp32."""
        return self.high_precision_bytes if self.autocast else self.compute_bytes

    def linear_input(self, width: int, readers: int) -> int:
        """The input that `readers` linear layers share. Autocast casts it for each of them anew; layers that are cut
        over ranks take it together."""
        return self.residual_tokens * width * self.compute_bytes * (readers if self.autocast and self.tp == 1 else 1)

    def weight_copies(self, count: int) -> int:
        """Copies of `count` fp32 weights, kept by the products with them."""
        return count * self.compute_bytes if self.autocast else 0


def saved_by_inputs(spec: ModelSpec, run: ForwardShape, first: bool) -> int:
    """What blocks share; the first stage has the tokens."""
    ring = run.layout.cp > 1 and run.layout.cp_method == "ring"
    places = run.tokens if run.masked else run.tokens // run.batch  # positions start anew with each document
    tokens = run.tokens * (INDEX if run.tp == 1 else INDEX + 1)  # embedding; and whose rows other ranks have
    # Learned: the embedding's indices, of runs of tokens (ulysses) as a view of the whole row's.
    positions = (places if ring or run.masked else run.sequence) * INDEX
    tables = 2 * places * spec.head_dim * run.high_precision_bytes  # rope: products with cosine and sine
    again = run.masked and run.layout.activation_checkpointing != "none"
    mask = run.batch * run.sequence * (INDEX if ring else run.sequence) if again else 0  # bool, to compute again
    kept = tables if spec.position_embedding == "rope" else positions if first else 0
    return kept + (tokens if first else 0) + mask


def saved_by_norm(spec: ModelSpec, run: ForwardShape) -> int:
    """A norm of the residual stream."""
    if spec.norm == "layernorm":
        return run.residual_tokens * (spec.hidden_size + 2) * run.residual_bytes  # x, its mean and 1 / std
    return _rms_norm(run, run.residual_tokens, spec.hidden_size)


def _rms_norm(run: ForwardShape, vectors: int, width: int) -> int:
    """Over `vectors` of `width`: x, x / rms and 1 / rms."""
    return vectors * (2 * width + 1) * run.high_precision_bytes


def saved_by_attention(spec: ModelSpec, run: ForwardShape) -> Counter[str]:
    """Projections, norms of queries and keys, and flash attention: q, k, v, its output, which is wo's input, and the
    logsumexp of each row and head; with a mask also that, as numbers to add.

    Around a ring (`layout.cp_method`) no mask is kept, and wo's input is a copy; after an all-to-all likewise, and
    key/value heads that are fewer than the ranks are repeated.
    """
    if run.tp > 1 and run.layout.tp_attention == "gathered":
        return _gathered_attention(spec, run)
    D, H, K, kv_heads = (
        spec.hidden_size,
        run.largest_share(spec.num_heads),
        spec.head_dim,
        run.largest_share(spec.num_kv_heads),
    )
    q, kv = H * K, kv_heads * K
    kept = run.linear_input(D, readers=3)  # wq, wk, wv
    weights = 2 * D * (q + kv)
    if spec.qk_norm == "head":
        kept += _rms_norm(run, run.tokens * (H + kv_heads), K)
        weights += 2 * K
    elif spec.qk_norm == "full":
        kept += _norm_of_all_heads(run, q) + _norm_of_all_heads(run, kv)
        weights += q + kv
    cp, ring = run.layout.cp, run.layout.cp_method == "ring"
    inner = kv if cp == 1 or ring else max(kv_heads, cp) * K
    kept += run.tokens * (2 * q + 2 * inner + (q if cp > 1 else 0)) * run.compute_bytes
    kept += run.tokens * H * run.high_precision_bytes
    kept += run.batch * run.sequence**2 * run.compute_bytes if run.masked and not (cp > 1 and ring) else 0
    return Counter(attention=kept, weight_copies=run.weight_copies(weights))


def _gathered_attention(spec: ModelSpec, run: ForwardShape) -> Counter[str]:
    """The same where ranks have columns of heads: queries and keys are there whole, and of the heads that its columns
    belong to a rank has values, output and logsumexp."""
    D, K, whole = spec.hidden_size, spec.head_dim, spec.num_heads * spec.head_dim
    columns = whole // run.tp
    mine = max(-(-(first + columns) // K) - first // K for first in range(0, whole, columns))
    kept, weights = run.linear_input(D, readers=3), 3 * D * columns
    if spec.qk_norm == "head":
        kept += _rms_norm(run, 2 * run.tokens * spec.num_heads, K)
        weights += 2 * K
    elif spec.qk_norm == "full":
        kept += 2 * _rms_norm(run, run.tokens, whole)
        weights += 2 * whole
    kept += run.tokens * (2 * whole + 2 * mine * K) * run.compute_bytes + run.tokens * mine * run.high_precision_bytes
    kept += run.batch * run.sequence**2 * run.compute_bytes if run.masked else 0
    return Counter(attention=kept, weight_copies=run.weight_copies(weights))


def _norm_of_all_heads(run: ForwardShape, width: int) -> int:
    """Over all heads; where ranks share these it is made of single operations."""
    if run.tp == 1 or run.compute_bytes == run.high_precision_bytes:
        return _rms_norm(run, run.tokens, width)
    return run.tokens * (width * (run.high_precision_bytes + run.compute_bytes) + run.high_precision_bytes)


def saved_by_mlp(spec: ModelSpec, run: ForwardShape) -> Counter[str]:
    """A dense MLP."""
    ffn = run.largest_share(spec.ffn_hidden_size)
    if spec.activation == "swiglu":
        return Counter(
            mlp=_swiglu(run, spec.hidden_size, ffn), weight_copies=run.weight_copies(3 * spec.hidden_size * ffn)
        )
    kept = run.linear_input(spec.hidden_size, readers=1)  # up
    kept += 2 * run.tokens * ffn * run.compute_bytes  # gelu: its input; down: its output
    return Counter(mlp=kept, weight_copies=run.weight_copies(2 * spec.hidden_size * ffn))


def _swiglu(run: ForwardShape, width: int, ffn: int) -> int:
    inner = 4 * run.tokens * ffn * run.compute_bytes  # silu: gate x; product: silu and up x; down: the product
    return run.linear_input(width, readers=2) + inner  # gate, up


def saved_by_experts(spec: ModelSpec, moe: MoESpec, run: ForwardShape) -> Counter[str]:
    """Routers, routed and shared experts. No expert drops a token, so that which one it went to does not matter; of
    ranks that have different experts each is given as many rows as it sends (they are balanced)."""
    D, E, k, ep = spec.hidden_size, moe.num_experts, moe.top_k, run.layout.ep
    rows, F = _expert_rows(moe, run)
    shared = run.largest_share(moe.expert_ffn_size * moe.num_shared_experts) if moe.num_shared_experts else 0
    kept = run.linear_input(D, readers=1)  # the router
    if shared and run.autocast:  # else gate and up of the shared experts read what the router does
        kept += run.linear_input(D, readers=2)
    kept += 4 * run.tokens * shared * run.compute_bytes  # as in a SwiGLU
    kept += (
        run.residual_tokens * (2 * E + 1) * run.high_precision_bytes
    )  # z-loss: logits and logsumexp; softmax or sigmoid: scores
    kept += (
        run.residual_tokens * run.high_precision_bytes if moe.router_score == "sigmoid" else 0
    )  # balance loss: sums of scores
    kept += (
        run.residual_tokens * (k + 1) * run.high_precision_bytes if moe.normalize_top_k else 0
    )  # chosen scores and their sums
    kept += (
        (1 if moe.balance_loss_scope == "micro_batch" else run.batch) * E * run.high_precision_bytes
    )  # balance loss: shares of tokens
    kept += (run.residual_tokens * k + 2 * rows) * INDEX  # gather: the chosen; sorting by expert, and back
    kept += 2 * rows * INDEX if ep > 1 else 0  # sorting what came from all ranks by expert, and back
    kept += rows * (D + 4 * F) * run.compute_bytes  # the experts, each a SwiGLU
    kept += rows * (D + 1) * run.compute_bytes  # weighted sum: outputs and weights
    # Grouped products, where there is one for the dtype and the sizes, keep where each expert's rows end (int32).
    grouped = run.compute_bytes <= 4 and D * run.compute_bytes % 16 == 0 and F * run.compute_bytes % 16 == 0
    kept += 3 * (E // ep) * 4 if grouped else 0
    return Counter(experts=kept, weight_copies=run.weight_copies(D * E + 3 * D * (F * E // ep + shared)))


def saved_by_head(spec: ModelSpec, run: ForwardShape) -> Counter[str]:
    """The head and the loss."""
    kept = run.linear_input(spec.hidden_size, readers=1)
    vocab = run.largest_share(spec.vocab_size)
    kept += (
        run.tokens * vocab * run.high_precision_bytes
    )  # log-softmax: its output. The fp32 copy of bf16 logits is dropped
    if run.tp == 1:
        kept += (
            run.tokens * INDEX + run.high_precision_bytes
        )  # negative log-likelihood: targets, and their total weight
    else:
        kept += run.tokens * (INDEX + 2)  # each target's column, whether it is here, and whether it counts
    return Counter(head_and_loss=kept, weight_copies=run.weight_copies(vocab * spec.hidden_size))


def mlp_backward_bytes(spec: ModelSpec, layer: int, run: ForwardShape, halved: bool) -> int:
    """What is on its way through a block's MLP or experts in the backward pass where that is most, beyond what is freed
    until then: gradients of a SwiGLU's two factors, or of a GELU's output; of the rows of experts, before and after
    their sorting. `halved`: with the input of the last product, which is not freed then."""
    if spec.moe is None or not spec.is_moe_layer(layer):
        return (
            ((2 if spec.activation == "swiglu" else 1) + halved)
            * run.tokens
            * run.largest_share(spec.ffn_hidden_size)
            * run.compute_bytes
        )
    rows, F = _expert_rows(spec.moe, run)
    return rows * (2 * spec.hidden_size + 3 * F if halved else 2 * max(spec.hidden_size, F)) * run.compute_bytes


def _expert_rows(moe: MoESpec, run: ForwardShape) -> tuple[int, int]:
    """How many rows a rank's experts are given, and their inner width. Ranks that share products have some columns of
    every expert, and so all tokens; or some experts, and their own tokens."""
    tokens, width = (
        (run.residual_tokens, moe.expert_ffn_size)
        if run.layout.ep > 1
        else (run.tokens, run.largest_share(moe.expert_ffn_size))
    )
    return tokens * moe.top_k, width


def deferred_weight_grad_bytes(spec: ModelSpec, layer: int, run: ForwardShape) -> int:
    """What the second half of a block's backward pass needs (`parallel.split_backward`): of every linear layer its
    input, the gradient of its output, and under autocast the copy of its weight."""
    D, q, kv = (
        spec.hidden_size,
        run.largest_share(spec.num_heads) * spec.head_dim,
        run.largest_share(spec.num_kv_heads) * spec.head_dim,
    )
    if run.layout.tp_attention == "gathered":
        q = kv = spec.num_heads * spec.head_dim // run.tp
    kept = run.linear_input(D, readers=3) + run.tokens * (2 * q + 2 * kv + D) * run.compute_bytes
    kept += saved_by_attention(spec, run)["weight_copies"]
    if spec.moe is None or not spec.is_moe_layer(layer):
        kept += saved_by_mlp(spec, run)["weight_copies"]
        ffn, first = run.largest_share(spec.ffn_hidden_size), 2 if spec.activation == "swiglu" else 1
        return kept + run.linear_input(D, readers=first) + run.tokens * ((1 + first) * ffn + D) * run.compute_bytes
    moe, (rows, F) = spec.moe, _expert_rows(spec.moe, run)
    shared = run.largest_share(moe.expert_ffn_size * moe.num_shared_experts) if moe.num_shared_experts else 0
    kept += saved_by_experts(spec, moe, run)["weight_copies"]
    kept += run.linear_input(D, readers=3 if shared else 1) + run.residual_tokens * moe.num_experts * run.compute_bytes
    kept += run.tokens * (3 * shared + D) * run.compute_bytes if shared else 0
    return kept + rows * (2 * D + 3 * F) * run.compute_bytes


def deferred_head_grad_bytes(spec: ModelSpec, run: ForwardShape) -> int:
    """The same of the head."""
    vocab = run.largest_share(spec.vocab_size)
    return (
        run.linear_input(spec.hidden_size, readers=1)
        + run.tokens * vocab * run.compute_bytes
        + run.weight_copies(vocab * spec.hidden_size)
    )
