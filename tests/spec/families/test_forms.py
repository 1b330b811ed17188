"""Fields of config.json that are not the value of one dial."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.spec.families.forms import score_factor
from phalanx.spec.model import ModelSpec

SIZES = {"vocab_size": 8, "hidden_size": 32, "num_layers": 1, "num_heads": 2, "ffn_hidden_size": 8, "max_seq_len": 8}


@given(factor=st.floats(0.01, 8), head_dim=st.sampled_from([16, 64, 96, 128]))
def test_factor_of_scores_is_read_as_the_same_scale(factor: float, head_dim: int) -> None:
    scale = head_dim**-0.5 * factor
    spec = ModelSpec.model_validate(SIZES | {"head_dim": head_dim, "attention_scale": scale})
    assert head_dim**-0.5 * score_factor(spec) == scale
