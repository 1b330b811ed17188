"""Small models of every Hugging Face family train in drawn layouts as on one process (`python -m tests.parity.fuzz
--families` draws more)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity import fuzz


@pytest.mark.parametrize("kind", fuzz.SMALL_CONFIGS)
def test_family_in_a_drawn_layout_equals_single_process(kind: str, text: Path) -> None:
    [drawn] = fuzz.draw_valid_layouts(seed=1, count=1, text=text, only_model=kind)
    assert fuzz.max_relative_difference(text, *drawn) < fuzz.TOLERANCE
