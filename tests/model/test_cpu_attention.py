"""Attention by document and by block of a window equals attention from all scores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.model.attention import attend
from phalanx.model.cpu_attention import MIN_WINDOW_BLOCK, _split_window_blocks
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


def attend_by_document(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, window: int | None, sinks: Tensor | None, softcap: float | None
) -> Tensor:
    return attend(q, k, v, locate_documents(starts).bounds, window=window, sinks_H=sinks, softcap=softcap)


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, _: Tensor, window: int | None, sinks: Tensor | None, softcap: float | None
) -> Tensor:
    return attend(q, k, v, None, window=window, sinks_H=sinks, softcap=softcap)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_with_windows_sinks_and_caps_equals_all_scores_in_fp64(
    dtype: torch.dtype, pytestconfig: pytest.Config
) -> None:
    cases = CASES + CAPPED_CASES
    # Other dtypes choose other kernels, with the same documents and windows: a sample has each value of each field.
    for case in cases if dtype == torch.float64 or pytestconfig.getoption("--all") else cases[::7]:
        error = max_relative_error(compute(attend_by_document, case, dtype), compute_from_all_scores(case))
        assert error < 8 * torch.finfo(dtype).eps, case


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_rows_without_documents_have_windows_sinks_and_caps(
    window: int | None, sinks: bool, softcap: float | None
) -> None:
    case = AttentionCase("whole", window, "grouped", sinks, softcap)
    assert max_relative_error(compute(attend_rows, case), compute(attend_to_all_scores, case)) < 1e-14


def test_window_blocks_contain_each_visible_pair_once() -> None:
    for window in (1, 7, MIN_WINDOW_BLOCK, 200):
        blocks = list(_split_window_blocks([0, 1, 500, 520], window))
        queries = [query for block, _ in blocks for query in range(block.start, block.stop)]
        assert queries == list(range(520))
        for block, keys in blocks:
            assert keys.stop == block.stop
            assert keys.stop - keys.start < max(window, MIN_WINDOW_BLOCK) + window
            is_first = keys.start in (0, 1, 500)
            assert is_first or keys.start == block.start - window + 1, "FlopCounter infers the window from the sizes"


@pytest.mark.parametrize("changes", [{}, {"full_attention_layers": [0]}, {"attention_sinks": True}])
def test_tokens_outside_of_window_have_no_effect(build_model, tokens, changes) -> None:
    """With two layers of 4 keys, a token reaches 6 later ones; with a full-attention layer, all of them."""
    model = build_model(sliding_window=4, **changes)
    changed = tokens.clone()
    changed[:, 2] = (changed[:, 2] + 1) % 53
    differs = (model(changed)[0] - model(tokens)[0]).abs().amax((0, 2)) > 1e-9
    last = tokens.shape[1] if "full_attention_layers" in changes else 2 + 2 * 3 + 1
    assert differs.nonzero().flatten().tolist() == list(range(2, last))


def test_tokens_see_those_of_their_chunk_of_a_document_only(build_model, tokens) -> None:
    """With documents from 0 and 3 on in each row, chunks of 4 are tokens 0 to 2, 3 to 6, 7 to 10, and so on."""
    rows, row_tokens = tokens.shape
    documents = locate_documents(torch.tensor([0] * 3 + [3] * (row_tokens - 3)).expand(rows, -1))
    model = build_model(attention_chunk=4)
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 53
    for masked, last in ((documents, 7), (None, 8)):
        differs = (model(changed, masked)[0] - model(tokens, masked)[0]).abs().amax((0, 2)) > 1e-9
        assert differs.nonzero().flatten().tolist() == list(range(4, last))


def test_chunk_as_long_as_the_row_changes_nothing(build_model, tokens) -> None:
    chunked = build_model(attention_chunk=tokens.shape[1])
    assert torch.equal(chunked(tokens)[0], build_model()(tokens)[0])


def test_window_as_long_as_the_row_changes_nothing(build_model, tokens) -> None:
    windowed = build_model(sliding_window=tokens.shape[1])
    assert torch.equal(windowed(tokens)[0], build_model()(tokens)[0])
