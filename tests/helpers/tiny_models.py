"""Model that is small enough to count its bytes by hand."""

from __future__ import annotations

from phalanx.spec.model import ModelSpec, MoESpec

TINY_MOE = ModelSpec(
    vocab_size=256,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    ffn_hidden_size=128,
    max_seq_len=64,
    tie_embeddings=False,
    moe=MoESpec(num_experts=8, top_k=2, expert_ffn_size=128),
)
