"""Shapes of the matrix products and attention that one rank of a run computes.

Symbols: B batch, T tokens, H heads, K head width. A product has m rows, n outputs and k inputs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

from phalanx.cost.exact.flops import block_products, lm_head_shape
from phalanx.program.pipeline_split import layers_per_rank
from phalanx.program.rank_tensors import rank_tensors
from phalanx.spec.attention_backend import has_chunks, hides_keys
from phalanx.spec.layers import layer_specs
from phalanx.spec.parameter_shapes import num_elements
from phalanx.spec.parts.attended_keys import attended_keys
from phalanx.spec.parts.flops import tokens_through
from phalanx.spec.parts.model import layer_inputs
from phalanx.spec.resolved_run import ResolvedRun


@dataclass(frozen=True)
class MatmulShape:
    """A linear layer on one micro-batch: [m, k] times [k, n]; for experts, `batch` of them in one call."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """FLOPs of the forward pass, and of each of the two products of the backward pass."""
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The two products of attention: a rank's queries with all keys, or with those of one ring step."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool
    masked: bool
    """True if documents are masked from each other."""
    ring: bool = False
    """True for a step of ring attention, which saves its softmax denominators."""
    window: int | None = None
    """Keys that a query sees at most; None if it sees all earlier ones."""
    sinks: bool = False
    """True if heads have a logit in the denominator of the softmax. Steps of a ring do without."""
    softcap: float | None = None
    """Cap of scores; None without one."""
    chunk: int | None = None
    """Tokens of a row that see each other only; None: all of it."""

    @property
    def flops(self) -> int:
        """FLOPs of the forward pass over all pairs of tokens, or half of them if causal: 4 B H T T K.

        Source: arXiv 2204.02311, appendix B. The backward pass has twice as many. A dense document mask, as on CUDA in
        fp32, has all pairs. With a window, pairs beyond it do not count."""
        pairs = self.queries * self.keys // (2 if self.causal else 1)
        if self.chunk is not None:
            pairs = int(self.queries * attended_keys(None, self.keys, self.causal, self.chunk))
        if self.window is not None:
            pairs -= (self.keys - self.window) ** 2 // 2
        return 4 * self.batch * self.heads * pairs * self.head_dim


def matmul_shapes(resolved: ResolvedRun) -> dict[MatmulShape, tuple[tuple[str, ...], int]]:
    """Return the products of a rank's forward pass on one micro-batch: their layers and counts.

    The count is the maximum over pipeline stages. Experts are balanced; shards are those of the rank with the
    largest. Raises UserError if the layout cannot run on the ranks.
    """
    run = resolved.run
    tokens = resolved.batch.micro_batch_size * run.training.seq_len / run.layout.cp
    layers_by_shape: dict[MatmulShape, tuple[tuple[str, ...], int]] = {}
    layers_of_stage = layers_per_rank(run)
    for stage, tensors in enumerate(rank_tensors(resolved)):
        stage_layers: dict[MatmulShape, list[str]] = {}
        shapes = tensors.all
        for product in block_products(run, layers_of_stage[stage]):
            *experts, n, k = shapes[product.name]
            num_experts = num_elements(tuple(experts))
            rows = int(product.tokens(run, tokens))
            shape = MatmulShape(num_experts, max(1, rows // num_experts), n, k)
            # Names without the common part: "wq", "experts.gate"
            name = product.name.split(".", 3)[-1].removesuffix(".weight")
            stage_layers.setdefault(shape, []).append(name)
        part = layer_inputs(run.model)
        for linear in part.linears if part else ():
            shape = MatmulShape(1, int(tokens_through(linear, run.layout, tokens)), *linear.matrix.shape)
            stage_layers.setdefault(shape, []).append(linear.name)
        head = lm_head_shape(run, tensors, stage)  # possibly the embedding
        if head is not None:
            stage_layers.setdefault(MatmulShape(1, int(tokens), *head), []).append("head")
        for matmul, names in stage_layers.items():
            layers, count = layers_by_shape.get(matmul, ((), 0))
            layers_by_shape[matmul] = tuple(dict.fromkeys((*layers, *names))), max(count, len(names))
    return layers_by_shape


def attention_shapes(resolved: ResolvedRun) -> dict[AttentionShape, int]:
    """Return the attention calls of a rank's forward pass on one micro-batch, with their counts.

    The first step of a ring is causal; each other step has half of the pairs. Raises UserError if the layout cannot
    run on the ranks.
    """
    run = resolved.run
    spec = run.model
    layout = run.layout
    tokens = run.training.seq_len
    layers = max(layers_per_rank(run), key=len) if layout.pp > 1 else range(spec.num_blocks)
    is_ring = layout.cp_method == "ring" and layout.cp > 1
    if is_ring:
        tokens //= layout.cp
    ranks_of_heads = 1 if is_ring else layout.cp
    micro_batch_size = resolved.batch.micro_batch_size
    counts: Counter[AttentionShape] = Counter()
    kinds = layer_specs(spec)
    for layer in (kinds[index] for index in layers if kinds[index].attends):
        heads, kv_heads = (max(1, -(-count // layout.tp)) for count in (layer.num_heads, layer.num_kv_heads))
        make_shape = partial(
            AttentionShape,
            batch=micro_batch_size,
            heads=heads // ranks_of_heads,
            kv_heads=max(1, kv_heads // ranks_of_heads),
            queries=tokens,
            head_dim=layer.head_dim,
            masked=run.data.mask_documents,
            ring=is_ring,
        )
        window = layer.sliding_window if hides_keys(layer, run.training.seq_len) else None
        sinks = layer.attention_sinks and not is_ring
        # In a ring, chunks are blocks of its steps.
        chunk = layer.attention_chunk if has_chunks(layer, tokens) and not is_ring else None
        shape = make_shape(
            keys=tokens, causal=True, window=window, chunk=chunk, sinks=sinks, softcap=layer.attention_softcap
        )
        counts[shape] += 1
        if is_ring:
            counts[make_shape(keys=tokens // 2, causal=False)] += layout.cp - 1
    return counts
