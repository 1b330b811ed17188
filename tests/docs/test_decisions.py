"""Pages of design decisions have one form, are listed, and are named by the code that they explain."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DECISIONS = ROOT / "docs" / "design" / "decisions"
PAGES = sorted(path for path in DECISIONS.glob("*.md") if path.stem != "index")
REFERENCE = re.compile(r"docs/design/decisions/[\w.-]*[\w-]")
LISTS = (DECISIONS / "index.md", ROOT / "docs" / "design" / "architecture.md")
"""Pages that link every decision."""


def source_references() -> set[str]:
    """Return the paths of decisions that the package names."""
    return {path for file in (ROOT / "src").rglob("*.py") for path in REFERENCE.findall(file.read_text())}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_decision_has_title_context_decision_and_consequences(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert [line for line in lines if line.startswith("## ")] == ["## Context", "## Decision", "## Consequences"]
    for heading in ("## Context", "## Decision", "## Consequences"):
        assert lines[lines.index(heading) + 2].strip(), heading


def test_source_names_every_decision_and_no_other() -> None:
    assert source_references() == {page.relative_to(ROOT).as_posix() for page in PAGES}


@pytest.mark.parametrize("listing", LISTS, ids=lambda listing: listing.name)
def test_decisions_are_listed_once_by_their_titles(listing: Path) -> None:
    links = re.findall(r"\[([^\]]+)\]\((?:decisions/)?([\w-]+)\.md\)", listing.read_text())
    titles = sorted((page.stem, page.read_text().splitlines()[0].removeprefix("# ")) for page in PAGES)
    assert sorted((name, title) for title, name in links if name != "index") == titles
