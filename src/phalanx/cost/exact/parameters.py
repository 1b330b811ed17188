"""How many parameters a model has: in all, by part, and at work for one token. Exact, and without torch."""

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
"""What a module's parameters count as; the innermost of a name decides."""


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
    inactive_experts: int
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
        return self.total - self.inactive_experts

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


@lru_cache
def count_parameters(spec: ModelSpec) -> ParameterCount:
    """Count the parameters of `spec`: the sum over its tensors, `parameter_shapes`."""
    count: Counter[str] = Counter()
    biases = 0
    for name, shape in parameter_shapes(spec).items():
        part = next(PART_BY_MODULE[module] for module in reversed(name.split(".")) if module in PART_BY_MODULE)
        count[part] += num_elements(shape)
        biases += num_elements(shape) if name.endswith(".bias") and part != "norms" else 0
    return ParameterCount(
        **{part: count[part] for part in PART_BY_MODULE.values()},
        inactive_experts=count["experts"] // spec.moe.num_experts * (spec.moe.num_experts - spec.moe.top_k)
        if spec.moe
        else 0,
        biases=biases,
        tied_head=spec.vocab_size * spec.hidden_size if spec.tie_embeddings else 0,
    )
