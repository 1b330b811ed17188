"""Random model descriptions."""

from __future__ import annotations

from hypothesis import strategies as st

from phalanx.spec.model import ModelSpec, MoESpec


@st.composite
def model_specs(draw) -> ModelSpec:
    """Draw any small model that a ModelSpec can describe."""
    kv_heads = draw(st.integers(1, 3))
    layers = draw(st.integers(1, 4))
    moe = None
    if draw(st.booleans()):
        experts = draw(st.integers(2, 6))
        moe = MoESpec(
            num_experts=experts,
            top_k=draw(st.integers(1, experts)),
            expert_ffn_size=draw(st.integers(1, 9)),
            num_shared_experts=draw(st.integers(0, 2)),
            num_leading_dense_layers=draw(st.integers(0, layers - 1)),
        )
    activation = "swiglu" if moe else draw(st.sampled_from(["swiglu", "gelu", "gelu_tanh"]))
    return ModelSpec(
        vocab_size=draw(st.integers(2, 40)),
        hidden_size=draw(st.integers(1, 24)),
        num_layers=layers,
        num_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 4)),
        ffn_hidden_size=draw(st.integers(1, 30)),
        max_seq_len=draw(st.integers(1, 30)),
        activation=activation,
        moe=moe,
        norm=draw(st.sampled_from(["rmsnorm", "layernorm"])),
        tie_embeddings=draw(st.booleans()),
        position_embedding=draw(st.sampled_from(["rope", "learned"])),
        qk_norm=draw(st.sampled_from(["none", "head", "full"])),
        bias=activation != "swiglu" and draw(st.booleans()),
    )
