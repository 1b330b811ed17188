"""What the forward pass of one micro-batch leaves in memory for its backward pass. Exact, and without torch.

The method is that of Korthikanti et al. (arXiv 2205.05198, section 4): go through the operations, and count what each
keeps to compute its gradient. Their sum for a layer, T B D (34 + 5 H T / D) bytes, is of GPT in 16 bits with dropout.
Ours differs: flash attention (arXiv 2205.14135) keeps a row's logsumexp instead of T x T scores and their softmax,
there is no dropout, SwiGLU keeps four inner tensors where GELU keeps two, and autocast keeps a bf16 copy of a linear
layer's input for each layer that reads it.

The counts are those of PyTorch's CPU kernels, uncompiled, and tested against them to the byte. GPU kernels keep
slightly different things; and there, under a document mask, the model repeats key/value heads (`model/attention.py`).
Of what exists for a moment only, the loss's is counted (N V numbers each, usually the largest), and what is computed
again; gradients on their way between layers are not.

Symbols: B sequences, T tokens in each, N = B T, D width, H heads, K head width, F inner width, V vocabulary, E experts,
k of them per token; q and kv are the widths of all query and of all key/value heads together.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from phalanx.cost.precision import COMPUTED, Precision
from phalanx.spec.errors import UserError
from phalanx.spec.model import ModelSpec, MoESpec

Recompute = Literal["none", "selective", "full"]
INDEX = 8
"""Bytes of a token, target, position or place in an order: int64."""


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes alive after forward pass and loss, before backward, by part; and at the moments when more are."""

    inputs: int = 0
    """What blocks share: indices of tokens and positions, rotary tables; for recomputation also the mask."""
    checkpoints: int = 0
    """Inputs of the blocks (full) or attentions (selective) that are computed again."""
    norms: int = 0
    """Of the residual stream. The stream itself is kept here, as their input, and nowhere else."""
    attention: int = 0
    """Projections, norms of queries and keys, and attention itself."""
    mlp: int = 0
    """Dense MLPs."""
    experts: int = 0
    """Routers, routed and shared experts."""
    head_and_loss: int = 0
    """Input of the head, log-probabilities (at least fp32) and targets."""
    weight_copies: int = 0
    """Under autocast, bf16 copies of fp32 weights. They do not grow with the batch."""
    loss_gradients: int = 0
    """Not kept: gradients of log-probabilities and of the logits they are of, with which the backward pass begins
    beside everything else. (The forward pass ends with less: the logits, and of bf16 ones the fp32 copy.)"""
    recomputed: int = 0
    """The most kept while a block or attention is computed again in the backward pass; 0 where none is."""

    @property
    def total(self) -> int:
        """Bytes kept when the forward pass and the loss are done."""
        blocks = self.checkpoints + self.norms + self.attention + self.mlp + self.experts
        return self.inputs + blocks + self.head_and_loss + self.weight_copies

    @property
    def peak(self) -> int:
        """The most at one time: when the backward pass begins, or while something is computed again."""
        return max(self.total + self.loss_gradients, self.recomputed)


def activation_bytes(
    spec: ModelSpec,
    batch: int,
    sequence: int,
    precision: Precision,
    recompute: Recompute = "none",
    autocast: bool = False,
    masked: bool = False,
    tp: int = 1,
    sequence_parallel: bool = False,
) -> ActivationBytes:
    """Activations of one rank for a micro-batch of `batch` sequences of `sequence` tokens.

    Of `tp` tensor-parallel ranks one has a share of heads, inner widths and logits, and with `sequence_parallel` of the
    residual stream's tokens too, which norms and products keep (arXiv 2205.05198, section 4.2). Raises UserError for
    experts or norms over all heads on several of these, which are not counted yet.

    bf16 is either `autocast` over fp32 parameters (one process, DDP; no effect on fp32 and fp64), or parameters that
    are bf16 themselves (ZeRO). `masked`: documents in a sequence are hidden from each other.

    The backward pass frees what it is done with, so that while layer l is computed again there is what the layers
    before it keep, what it drops itself, and nothing of those after it or of the loss.
    """
    if tp > 1 and (spec.moe is not None or spec.qk_norm == "full"):
        problem = "activations of experts, or with norms over all heads, are not counted for several ranks yet"
        raise UserError("parallel.tp", tp, problem, "set parallel.tp = 1")
    run = _Pass(batch, sequence, precision, autocast and precision == "bf16", masked, tp, sequence_parallel)
    stream = run.here * spec.width * run.stream
    norm = Counter(norms=_norm(spec, run))
    again = Counter(checkpoints=stream)
    kept = Counter(inputs=_inputs(spec, run, recompute))
    alive = []
    for layer in range(spec.layers):
        attention = _attention(spec, run)
        mlp = _moe(spec, spec.moe, run) if spec.moe and spec.is_moe(layer) else _mlp(spec, run)
        if recompute == "full":
            kept += again
            # The first norm keeps the block's input, which is there already, unless it needs it in fp32.
            there = stream if spec.norm == "layernorm" or run.stream == run.wide else 0
            alive.append((kept + norm + attention + norm + mlp).total() - there)
        elif recompute == "selective":
            kept += norm + again
            # Likewise the projections their input, unless autocast makes copies of it.
            alive.append((kept + attention).total() - (0 if run.autocast else stream))
            kept += norm + mlp
        else:
            kept += norm + attention + norm + mlp
    kept += norm + _head(spec, run)
    # Of shared logits only the gradient in what the loss computes in, and where that is not theirs the other.
    each = 2 * run.wide if tp == 1 else run.wide + (run.number if run.number < run.wide else 0)
    loss_gradients = run.tokens * run.share(spec.vocab) * each
    return ActivationBytes(**kept, loss_gradients=loss_gradients, recomputed=max(alive, default=0))


@dataclass(frozen=True)
class _Pass:
    """Sizes of a forward pass; those of numbers are in bytes."""

    batch: int
    sequence: int
    precision: Precision
    autocast: bool
    masked: bool
    tp: int = 1
    sequence_parallel: bool = False

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def here(self) -> int:
        """Tokens of the residual stream on this rank."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    def share(self, count: int) -> int:
        """Of heads, columns or rows of the vocabulary, those of the rank that has most."""
        return max(1, -(-count // self.tp))

    @property
    def number(self) -> int:
        """What matrix products compute in."""
        return COMPUTED[self.precision]

    @property
    def wide(self) -> int:
        """What asks for accuracy: norms, softmax, rotary tables, the router. At least fp32."""
        return max(4, self.number)

    @property
    def stream(self) -> int:
        """The residual stream, which autocast leaves in the parameters' fp32."""
        return self.wide if self.autocast else self.number

    def linear_input(self, width: int, readers: int) -> int:
        """The input that `readers` linear layers share. Autocast casts it for each of them anew; layers that are cut
        over ranks take it together."""
        return self.here * width * self.number * (readers if self.autocast and self.tp == 1 else 1)

    def weights(self, count: int) -> int:
        """Copies of `count` fp32 weights, kept by the products with them."""
        return count * self.number if self.autocast else 0


def _inputs(spec: ModelSpec, run: _Pass, recompute: Recompute) -> int:
    places = run.tokens if run.masked else run.sequence  # positions start anew with each document
    tokens = run.tokens * (INDEX if run.tp == 1 else INDEX + 1)  # embedding; and whose rows other ranks have
    positions = places * INDEX  # learned: embedding
    tables = 2 * places * spec.head_dim * run.wide  # rope: products with cosine and sine
    mask = run.batch * run.sequence**2 if run.masked and recompute != "none" else 0  # bool, to compute again
    return tokens + (positions if spec.positions == "learned" else tables) + mask


def _norm(spec: ModelSpec, run: _Pass) -> int:
    if spec.norm == "layernorm":
        return run.here * (spec.width + 2) * run.stream  # x, its mean and 1 / std
    return _rms_norm(run, run.here, spec.width)


def _rms_norm(run: _Pass, vectors: int, width: int) -> int:
    """Over `vectors` of `width`: x, x / rms and 1 / rms."""
    return vectors * (2 * width + 1) * run.wide


def _attention(spec: ModelSpec, run: _Pass) -> Counter[str]:
    D, H, K, kv_heads = spec.width, run.share(spec.heads), spec.head_dim, run.share(spec.kv_heads)
    q, kv = H * K, kv_heads * K
    kept = run.linear_input(D, readers=3)  # wq, wk, wv
    weights = 2 * D * (q + kv)
    if spec.qk_norm == "head":
        kept += _rms_norm(run, run.tokens * (H + kv_heads), K)
        weights += 2 * K
    elif spec.qk_norm == "full":
        kept += _rms_norm(run, run.tokens, q) + _rms_norm(run, run.tokens, kv)
        weights += q + kv
    kept += run.tokens * (2 * q + 2 * kv) * run.number  # flash: q, k, v, and its output, which is wo's input
    kept += run.tokens * H * run.wide  # flash: logsumexp
    kept += run.batch * run.sequence**2 * run.number if run.masked else 0  # flash: the mask, as numbers to add
    return Counter(attention=kept, weight_copies=run.weights(weights))


def _mlp(spec: ModelSpec, run: _Pass) -> Counter[str]:
    ffn = run.share(spec.ffn)
    if spec.activation == "swiglu":
        return Counter(mlp=_swiglu(run, spec.width, ffn), weight_copies=run.weights(3 * spec.width * ffn))
    kept = run.linear_input(spec.width, readers=1)  # up
    kept += 2 * run.tokens * ffn * run.number  # gelu: its input; down: its output
    return Counter(mlp=kept, weight_copies=run.weights(2 * spec.width * ffn))


def _swiglu(run: _Pass, width: int, ffn: int) -> int:
    inner = 4 * run.tokens * ffn * run.number  # silu: gate x; product: silu and up x; down: the product
    return run.linear_input(width, readers=2) + inner  # gate, up


def _moe(spec: ModelSpec, moe: MoESpec, run: _Pass) -> Counter[str]:
    """No expert drops a token, so that which one it went to does not matter."""
    N, D, F, E, k = run.tokens, spec.width, moe.ffn, moe.experts, moe.top_k
    shared = F * moe.shared_experts
    kept = run.linear_input(D, readers=3 if shared else 1)  # the router; gate and up of the shared experts
    kept += 4 * N * shared * run.number  # as in a SwiGLU
    kept += N * (2 * E + 1) * run.wide  # z-loss: logits and logsumexp; softmax or sigmoid: scores
    kept += N * run.wide if moe.score == "sigmoid" else 0  # balance loss: sums of scores
    kept += N * (k + 1) * run.wide if moe.normalize_top_k else 0  # chosen scores and their sums
    kept += (1 if moe.balance_over == "micro_batch" else run.batch) * E * run.wide  # balance loss: shares of tokens
    kept += 3 * N * k * INDEX  # gather: the chosen; sorting by expert, and back
    kept += N * k * (D + 4 * F) * run.number  # the experts, each a SwiGLU
    kept += N * k * (D + 1) * run.number  # weighted sum: outputs and weights
    # Grouped products, where there is one for the dtype and the sizes, keep where each expert's rows end (int32).
    grouped = run.number <= 4 and D * run.number % 16 == 0 and F * run.number % 16 == 0
    kept += 3 * E * 4 if grouped else 0
    return Counter(experts=kept, weight_copies=run.weights(D * E + 3 * D * (F * E + shared)))


def _head(spec: ModelSpec, run: _Pass) -> Counter[str]:
    kept = run.linear_input(spec.width, readers=1)
    vocab = run.share(spec.vocab)
    kept += run.tokens * vocab * run.wide  # log-softmax: its output. The fp32 copy of bf16 logits is dropped
    if run.tp == 1:
        kept += run.tokens * INDEX + run.wide  # negative log-likelihood: targets, and their total weight
    else:
        kept += run.tokens * (INDEX + 2)  # each target's column, whether it is here, and whether it counts
    return Counter(head_and_loss=kept, weight_copies=run.weights(vocab * spec.width))
