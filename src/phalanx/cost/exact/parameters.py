"""Exact number of parameters of a model: total, by part, and active per token. Needs no torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from phalanx.cost.exact.parameter_shapes import num_elements, parameter_shapes
from phalanx.spec.model import ModelSpec

PART_BY_MODULE = {
    "embedding": "embedding",
    "positions": "embedding",
    "attention": "attention",
    "mlp": "mlp",
    "experts": "experts",
    "shared": "shared_experts",
    "router": "router",
    **dict.fromkeys(("attention_norm", "mlp_norm", "q_norm", "k_norm", "norm"), "norms"),
    "head": "head",
}
"""Part that a module's parameters belong to; the innermost module of a name decides."""


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters by part. Buffers (a router's balancing bias, rotary tables) are not parameters."""

    embedding: int
    """Token embedding, and learned positions."""
    attention: int
    """Query, key, value and output projections, with their biases, and sinks."""
    mlp: int
    """Dense MLPs, with their biases."""
    experts: int
    """Routed experts."""
    shared_experts: int
    """Experts that process every token."""
    router: int
    norms: int
    """Norms of the residual stream, and of queries and keys."""
    head: int
    """Output projection to the vocabulary; 0 if it is tied to the embedding."""
    inactive_experts: int
    """Part of `experts` that one token does not use."""
    biases: int
    """Biases of attention and MLPs, and sinks; part of these counts."""
    tied_head: int
    """Embedding parameters that a tied head reuses in its product."""

    @property
    def total(self) -> int:
        """Number of parameters, each counted once."""
        blocks = self.attention + self.mlp + self.experts + self.shared_experts + self.router
        return self.embedding + blocks + self.norms + self.head

    @property
    def active(self) -> int:
        """Parameters that one token uses: top_k of the routed experts, and everything else."""
        return self.total - self.inactive_experts

    @property
    def matmul(self) -> int:
        """Active parameters in a token's matrix products: projections, MLPs, experts, router and head.

        Embedding tables are lookups, and norms and biases are element-wise, so they do not count. A tied head counts
        here, although it has no parameters of its own.
        """
        return self.active - self.embedding - self.norms - self.biases + self.tied_head

    @property
    def block_matrices(self) -> int:
        """Two-dimensional parameters inside blocks, active or not, which Muon trains."""
        return self.total - self.embedding - self.head - self.norms - self.biases


@lru_cache
def count_parameters(spec: ModelSpec) -> ParameterCount:
    """Return the number of parameters of a model by part: the sums over `parameter_shapes`."""
    count: Counter[str] = Counter()
    biases = 0
    for name, shape in parameter_shapes(spec).items():
        part = next(PART_BY_MODULE[module] for module in reversed(name.split(".")) if module in PART_BY_MODULE)
        count[part] += num_elements(shape)
        biases += num_elements(shape) if name.endswith((".bias", ".sinks")) and part != "norms" else 0
    return ParameterCount(
        **{part: count[part] for part in PART_BY_MODULE.values()},
        inactive_experts=count["experts"] // spec.moe.num_experts * (spec.moe.num_experts - spec.moe.top_k)
        if spec.moe
        else 0,
        biases=biases,
        tied_head=spec.vocab_size * spec.hidden_size if spec.tie_embeddings else 0,
    )
