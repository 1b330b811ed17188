"""Counts of attended keys equal those of masks, and are used for FLOPs and by the planner."""

from __future__ import annotations

import pytest
import torch

from phalanx.cost.exact.flops import forward_flops
from phalanx.plan.tables.job_columns import model_columns
from phalanx.program.pipeline_split import layer_flops
from phalanx.spec.layers import layer_specs
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.attended_keys import attended_fraction, attended_keys

SPEC = ModelSpec(vocab_size=9, hidden_size=16, num_layers=4, num_heads=2, ffn_hidden_size=8, max_seq_len=64)


@pytest.mark.parametrize("window", [1, 3, 40, 64, 100])
def test_attended_keys_are_pairs_of_mask_without_half_the_diagonal(window: int) -> None:
    mask = torch.ones(64, 64).tril().triu(1 - window)
    below, above = attended_keys(window, 64), attended_keys(window, 64, causal=False)
    # T / 2 approximates (T + 1) / 2: a triangle is half a square.
    assert below == pytest.approx(mask.sum().item() / 64 - min(window, 64) / 128)
    assert above == min(window, 64)


@pytest.mark.parametrize("chunk", [1, 24, 32, 64, 100])
def test_attended_keys_of_chunks_are_pairs_of_mask_without_half_the_diagonal(chunk: int) -> None:
    chunks = torch.arange(64) // chunk
    mask = chunks[:, None] == chunks
    below, above = (attended_keys(None, 64, causal, chunk) for causal in (True, False))
    assert below == pytest.approx((mask.tril().sum().item() - 32) / 64)
    assert above == pytest.approx(mask.sum().item() / 64)


def test_full_layers_attend_to_half_of_the_keys() -> None:
    spec = SPEC.replace(sliding_window=4, full_attention_layers=[1, 3])
    assert attended_fraction(layer_specs(spec), 64) == pytest.approx((32 + 3.875) / 64)
    assert attended_fraction(layer_specs(SPEC), 64) == attended_fraction(layer_specs(spec), 4) == 1
    assert model_columns(spec, 64)["attended_fraction"] == attended_fraction(layer_specs(spec), 64)


def test_scan_counts_as_attention_to_keys_with_its_flops() -> None:
    mixer = {"kind": "gated_delta", "num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 6, "value_head_dim": 8}
    for tokens in (64, 640):
        columns = model_columns(SPEC.replace(mixer=mixer, max_seq_len=tokens), tokens)
        channels = columns["heads"] * (columns["head_dim"] + columns["value_dim"])
        # Chunks of 64 tokens: scores of two key heads; products with the state, and in the chunk, of four value heads.
        assert columns["attended_fraction"] * channels * tokens == 2 * 4 * 6 * 64 + 4 * (6 * 6 * 8 + 4 * 8 * 64)


def test_flops_count_attended_keys() -> None:
    spec = SPEC.replace(sliding_window=4, full_attention_layers=[1])
    full, windowed = (forward_flops(model_spec, 64).core for model_spec in (SPEC, spec))
    assert full == 4 * 4 * 16 * 32
    assert windowed == pytest.approx(full * attended_fraction(layer_specs(spec), 64))
    embedding, first, second, *_ = layer_flops(spec, 64)
    assert second - first == 12 * 16 * (32 - 3.875)
    assert embedding + first > 0
