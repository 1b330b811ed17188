import math

import pytest
import torch

from phalanx.model.rotary import apply_rotary, frequencies, rotary_table
from phalanx.spec.families.config_json import hf_config
from phalanx.spec.model import ModelSpec, RopeSpec

ROPES = {
    "none": RopeSpec(theta=500_000.0),
    "linear": RopeSpec(scaling="linear", factor=4.0),
    "llama3.1": RopeSpec(theta=500_000.0, scaling="llama3", factor=8.0, original_context=8192),
    "llama3.2": RopeSpec(theta=500_000.0, scaling="llama3", factor=32.0, original_context=8192),
    "qwen3 yarn": RopeSpec(theta=1_000_000.0, scaling="yarn", factor=4.0, original_context=32_768),
    "yarn, other ramp": RopeSpec(scaling="yarn", factor=16.0, original_context=4096, beta_fast=24.0, beta_slow=2.0),
    "yarn, ramp beyond the head": RopeSpec(theta=100.0, scaling="yarn", factor=2.0, original_context=512),
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_rotary_frequencies_match_transformers(name, head_dim):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = ROPES[name]
    spec = ModelSpec(
        vocab_size=9, hidden_size=head_dim, num_layers=1, num_heads=1, ffn_hidden_size=8, max_seq_len=131_072, rope=rope
    )
    config = LlamaConfig(**hf_config(spec))
    kind = config.rope_parameters["rope_type"]
    plain = LlamaRotaryEmbedding.compute_default_rope_parameters
    theirs, scale = ROPE_INIT_FUNCTIONS.get(kind, plain)(config)
    torch.testing.assert_close(frequencies(rope, head_dim), theirs.double(), rtol=2e-6, atol=0)
    cos, _ = rotary_table(rope, head_dim, torch.tensor([0]), torch.float64)
    assert cos.flatten().tolist() == pytest.approx([scale] * head_dim, rel=1e-12)


def test_rotary_attention_score_depends_only_on_relative_position():
    q, k = torch.randn(2, 1, 1, 1, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(at_q, at_k):
        tables = [rotary_table(RopeSpec(), 32, torch.tensor([[position]]), torch.float64) for position in (at_q, at_k)]
        return (apply_rotary(q, tables[0]) * apply_rotary(k, tables[1])).sum().item()

    assert score(5, 2) == pytest.approx(score(1005, 1002), rel=1e-9)
    assert abs(score(5, 2) - score(5, 3)) > 1e-3


def test_rotary_table_is_accurate_at_large_positions():
    cos, _ = rotary_table(RopeSpec(), 4, torch.tensor([1_000_001]), torch.float32)
    assert cos.flatten()[0].item() == pytest.approx(math.cos(1_000_001), abs=1e-6)
