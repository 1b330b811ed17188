"""How many parameters a model has: in all, by part, and at work for one token. Exact, and without torch."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.spec.model import ModelSpec, MoESpec


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by part. Buffers (a router's balancing bias, rotary tables) are not parameters."""

    embedding: int
    """Token embedding, and positions where they are learned."""
    attention: int
    """Query, key, value and output projections, with their biases."""
    mlp: int
    """Dense MLPs, with their biases."""
    experts: int
    """Routed experts."""
    shared_experts: int
    """Experts that every token passes through."""
    router: int
    norms: int
    """Norms of the residual stream, and of queries and keys."""
    head: int
    """Output projection to the vocabulary; 0 where it is tied to the embedding."""
    idle: int
    """Of the routed experts, those that one token is not sent to."""
    biases: int
    """Of attention and MLPs, what is added rather than multiplied."""
    tied_head: int
    """Embedding parameters that a tied head uses once more in its product."""

    @property
    def total(self) -> int:
        """Every parameter, once."""
        blocks = self.attention + self.mlp + self.experts + self.shared_experts + self.router
        return self.embedding + blocks + self.norms + self.head

    @property
    def active(self) -> int:
        """Parameters that one token uses: top_k of the routed experts, and everything else."""
        return self.total - self.idle

    @property
    def matmul(self) -> int:
        """Active parameters in a token's matrix products: projections, MLPs, experts, router and head.

        Not the embedding tables, which are looked up, nor norms and biases; a tied head counts here, though
        it has no parameters of its own.
        """
        return self.active - self.embedding - self.norms - self.biases + self.tied_head

    @property
    def block_matrices(self) -> int:
        """Two-dimensional parameters inside blocks, active or not: what Muon trains."""
        return self.total - self.embedding - self.head - self.norms - self.biases


def parameters(spec: ModelSpec) -> ParameterCount:
    """Count the parameters of `spec`. Exact: equal to the sum over the tensors of `phalanx.model`.

    Symbols: D width, L layers; q and kv are the widths of all query and of all key/value heads together.
    """
    D, L = spec.width, spec.layers
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    moe_layers = sum(spec.is_moe(layer) for layer in range(L))
    dense_layers = L - moe_layers
    matrices = 3 if spec.activation == "swiglu" else 2
    attention_biases = L * (q + 2 * kv + D) if spec.bias else 0
    mlp_biases = dense_layers * (spec.ffn + D) if spec.bias else 0
    return ParameterCount(
        embedding=spec.vocab * D + (spec.context * D if spec.positions == "learned" else 0),
        attention=L * 2 * D * (q + kv) + attention_biases,
        mlp=dense_layers * matrices * D * spec.ffn + mlp_biases,
        experts=moe_layers * spec.moe.experts * _expert(D, spec.moe) if spec.moe else 0,
        shared_experts=moe_layers * spec.moe.shared_experts * _expert(D, spec.moe) if spec.moe else 0,
        router=moe_layers * D * spec.moe.experts if spec.moe else 0,
        norms=_norms(spec, q, kv),
        head=0 if spec.tied else spec.vocab * D,
        idle=moe_layers * (spec.moe.experts - spec.moe.top_k) * _expert(D, spec.moe) if spec.moe else 0,
        biases=attention_biases + mlp_biases,
        tied_head=spec.vocab * D if spec.tied else 0,
    )


def _expert(D: int, moe: MoESpec) -> int:
    """One expert is a SwiGLU: gate, up, down."""
    return 3 * D * moe.ffn


def _norms(spec: ModelSpec, q: int, kv: int) -> int:
    """Two norms per block and one before the head, LayerNorm with a bias; and those of queries and keys."""
    stream = (2 * spec.layers + 1) * spec.width * (2 if spec.norm == "layernorm" else 1)
    heads = {"none": 0, "head": 2 * spec.head_dim, "full": q + kv}[spec.qk_norm]
    return stream + spec.layers * heads
