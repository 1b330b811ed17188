"""The choice of the attention kernel, and its description."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.spec.attention_backend import AttentionBackend, choose_backend, describe_attention, has_window
from phalanx.spec.model import ModelSpec
from tests.helpers.small_runs import small_run

PLAIN = {"documents": False, "window": False, "sinks": False, "softcap": False}


@pytest.mark.parametrize(
    ("device", "half_precision", "head_dim", "changes", "expected"),
    [
        ("cpu", True, 64, {}, AttentionBackend.SDPA),
        ("cuda", False, 20, {}, AttentionBackend.SDPA),
        ("cpu", False, 20, {"documents": True}, AttentionBackend.CPU_FLASH),
        ("cpu", False, 20, {"window": True}, AttentionBackend.CPU_FLASH),
        ("cpu", False, 20, {"softcap": True}, AttentionBackend.CPU_FLASH),
        ("cuda", True, 64, {"softcap": True}, AttentionBackend.FLEX),
        ("cuda", True, 64, {"documents": True}, AttentionBackend.VARLEN),
        ("cuda", True, 64, {"window": True, "sinks": True}, AttentionBackend.VARLEN),
        ("cuda", False, 64, {"documents": True}, AttentionBackend.SDPA_MASKED),
        ("cuda", True, 20, {"documents": True}, AttentionBackend.SDPA_MASKED),
        ("cuda", True, 512, {"sinks": True}, AttentionBackend.FLEX),
        ("cuda", False, 64, {"documents": True, "window": True}, AttentionBackend.FLEX),
    ],
)
def test_choose_backend(
    device: str, half_precision: bool, head_dim: int, changes: dict[str, bool], expected: AttentionBackend
) -> None:
    backend = choose_backend(device, half_precision=half_precision, head_dim=head_dim, **{**PLAIN, **changes})
    assert backend == expected


def test_window_counts_only_if_sequences_are_longer() -> None:
    sizes: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "ffn_hidden_size": 8, "max_seq_len": 64}
    spec = ModelSpec(vocab_size=9, hidden_size=8, sliding_window=16, **sizes)
    assert [has_window(spec, length) for length in (16, 17)] == [False, True]
    assert not has_window(spec.replace(full_attention_layers=[0, 1]), 17)
    assert not has_window(spec.replace(sliding_window=None), 17)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "flash by document"),
        ({"data.mask_documents": False}, "scaled_dot_product_attention"),
        ({"model.sliding_window": 32}, "flash by document"),
        ({"model.sliding_window": 8, "data.mask_documents": False}, "flash by document, window 8"),
        (
            {"model.sliding_window": 8, "model.full_attention_layers": [1], "model.attention_sinks": True},
            "flash by document, window 8 in 1 of 2 layers, sinks",
        ),
        ({"layout.cp": 2, "model.attention_sinks": True}, "ring of keys and values, sinks"),
        (
            {"cluster.device": "cuda", "training.precision": "bf16", "model.attention_softcap": 5.0},
            "FlexAttention, capped scores",
        ),
        ({"cluster.device": "cuda", "training.precision": "bf16"}, "varlen (flash)"),
        ({"cluster.device": "cuda", "model.sliding_window": 8}, "FlexAttention, window 8"),
    ],
    ids=str,
)
def test_describe_attention(changes: dict[str, Any], expected: str, text: Path, tmp_path: Path) -> None:
    assert describe_attention(small_run(text, tmp_path, changes)) == expected
