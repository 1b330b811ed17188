import pytest

from phalanx.cost.exact.flops import (
    SELECTIVE_MATMUL_FRACTION,
    forward_flops,
    forward_flops_per_token,
    mfu,
    recomputed_flops_per_token,
    training_flops_per_token,
)
from phalanx.cost.exact.parameters import count_parameters
from phalanx.spec.files.load import load_model_spec
from phalanx.spec.model import ModelSpec

# The shapes with which peers were measured, and their FLOPs per token. Peers count
# norms as matrix products: 0.03 % more in SMALL, 201.38 M instead of 201.33 M.
TINY = ModelSpec(num_layers=6, hidden_size=256, num_heads=16, ffn_hidden_size=768, vocab_size=2048, max_seq_len=512)
SMALL = ModelSpec(
    num_layers=8, hidden_size=512, num_heads=8, num_kv_heads=4, ffn_hidden_size=1536, vocab_size=8192, max_seq_len=512
)


@pytest.mark.parametrize(("spec", "millions"), [(TINY, 43.3), (SMALL, 201.4)])
def test_training_flops_match_reference_figures_with_full_attention(spec, millions):
    assert training_flops_per_token(spec, 512, causal=False) / 1e6 == pytest.approx(millions, rel=1.1e-3)


def test_causal_mask_halves_attention_flops():
    matmul = 6 * count_parameters(TINY).matmul
    full, causal = (training_flops_per_token(TINY, 512, causal=c) for c in (False, True))
    assert full - matmul == 12 * 6 * 256 * 512
    assert causal - matmul == (full - matmul) / 2


def test_forward_flops_are_one_third_of_training_flops():
    assert forward_flops_per_token(SMALL, 512) * 3 == pytest.approx(training_flops_per_token(SMALL, 512))


def test_tied_lm_head_still_counts_as_matmul_parameters():
    untied, tied = (count_parameters(TINY.replace(tie_embeddings=t)) for t in (False, True))
    assert untied.matmul == tied.matmul
    assert untied.total - tied.total == 2048 * 256


def test_moe_training_flops_count_active_experts_only():
    assert training_flops_per_token(load_model_spec("mixtral-8x7b"), 1) / 6 == pytest.approx(12.75e9, rel=0.01)


def test_mfu_is_one_at_peak_flops():
    assert mfu(tokens_per_second=200, flops_per_token=1e9, peak_flops=1e11, ranks=2) == 1.0


def test_forward_flops_by_part_match_closed_forms():
    parts, matmul = forward_flops(TINY, 512, causal=False), 2 * count_parameters(TINY).matmul
    assert parts.projections == 2 * 6 * 4 * 256 * 256
    assert parts.core == 4 * 6 * 256 * 512
    assert parts.mlp == 2 * 6 * 3 * 256 * 768
    assert parts.head == 2 * 2048 * 256
    assert parts.projections + parts.mlp + parts.head == matmul


def test_recomputed_flops_match_activation_checkpointing_kind():
    """Full recomputation adds a forward pass of the blocks: the 72 BLsh^2 (1 + ...) of the model become 96 in
    hardware (Megatron-LM's paper on recomputation, arXiv 2205.05198, appendix A)."""
    parts = forward_flops(SMALL, 512)
    for recompute, flash, sharded, flops in (
        ("none", True, True, 0.0),
        ("norms", True, True, 0.0),
        ("full", True, False, parts.projections + parts.core + parts.mlp),
        ("selective", True, False, parts.projections + parts.core),
        ("attention core", True, False, 0.0),
        ("attention core", False, False, parts.core),
        ("operations", True, False, 0.0),
        ("operations", True, True, SELECTIVE_MATMUL_FRACTION * (parts.projections + parts.mlp)),
    ):
        assert recomputed_flops_per_token(SMALL, 512, recompute, flash=flash, sharded=sharded) == flops
    total = training_flops_per_token(SMALL, 512) + recomputed_flops_per_token(SMALL, 512, "full")
    assert (total - 3 * parts.head) / (training_flops_per_token(SMALL, 512) - 3 * parts.head) == pytest.approx(96 / 72)


def test_selective_matmul_fraction_matches_llama3_8b():
    spec = load_model_spec("llama3-8b")
    q, kv, mlp = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.ffn_hidden_size
    assert pytest.approx((kv + q + mlp) / (2 * q + 2 * kv + 3 * mlp), abs=0.02) == SELECTIVE_MATMUL_FRACTION
