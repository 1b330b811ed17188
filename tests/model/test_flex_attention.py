"""FlexAttention, uncompiled on a CPU, equals attention from all scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor

from phalanx.model import attention
from phalanx.model.attention import attend, attention_mask
from phalanx.model.flex_attention import attend_with_flex
from phalanx.spec.attention_backend import AttentionBackend
from tests.helpers.batches import locate_documents
from tests.helpers.reference_attention import (
    CAPPED_CASES,
    CASES,
    AttentionCase,
    attend_to_all_scores,
    compute,
    compute_from_all_scores,
    max_relative_error,
)


@pytest.fixture(autouse=True)
def _gradients_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow gradients on a CPU, which are right without compilation although PyTorch refuses them."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_equals_all_scores() -> None:
    for case in CASES + CAPPED_CASES[::5]:
        error = max_relative_error(compute(attend_with_flex, case), compute_from_all_scores(case))
        assert error < 1e-14, case


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("masked", [False, True])
def test_attention_uses_flex_where_it_is_chosen(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "choose_backend", lambda *_, **__: AttentionBackend.FLEX)
    calls = []

    def count(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *dials: Any) -> Tensor:
        calls.append(starts)
        return attend_with_flex(q, k, v, starts, *dials)

    def attend_rows(
        q: Tensor, k: Tensor, v: Tensor, starts: Tensor, window: int | None, sinks: Tensor | None, softcap: float | None
    ) -> Tensor:
        mask = attention_mask(locate_documents(starts), q.dtype, q.shape[-1], window=True) if masked else None
        return attend(q, k, v, mask, window=window, sinks_H=sinks, softcap=softcap)

    monkeypatch.setattr(attention, "attend_with_flex", count)
    case = AttentionCase("mixed" if masked else "whole", 5, "grouped", sinks=True, softcap=1.5)
    assert max_relative_error(compute(attend_rows, case), compute(attend_to_all_scores, case)) < 1e-14
    assert [starts is not None for starts in calls] == [masked]
