"""Generated pages of docs/reference are those that tools/reference_pages.py writes now."""

from __future__ import annotations

import pytest

from tools.reference_pages import PAGES, REFERENCE


@pytest.mark.parametrize("name", PAGES)
def test_generated_page_is_current(name: str) -> None:
    assert (REFERENCE / name).read_text() == PAGES[name](), "python tools/reference_pages.py"


def test_command_page_lists_options_and_examples() -> None:
    page = PAGES["cli.md"]()
    assert "## phalanx plan\n" in page
    assert "| `--nproc` `N` |" in page
    assert "```text\nphalanx plan run.toml --machine h100 --nodes 16" in page


def test_config_page_lists_fields_of_nested_tables() -> None:
    page = PAGES["config.md"]()
    assert "## `[model.moe]`" in page
    assert "| `top_k` | integer > 0 |" in page
