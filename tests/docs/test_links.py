"""Links of README.md and docs/ lead to files and headings that exist, and the repository paths in them exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.doc_commands import lines_outside_fences

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
REPOSITORY_PATH = re.compile(r"`((?:src|tests|examples|benchmarks|docs|tools)/[\w./-]+)`")


def page_id(page: Path) -> str:
    """Return the path of a page in the repository."""
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = [line.lstrip("#").strip() for _, line in lines_outside_fences(page.read_text()) if line.startswith("#")]
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower())) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_and_paths_of_page_exist(page: Path) -> None:
    problems = []
    for number, line in lines_outside_fences(page.read_text()):
        for target in LINK.findall(line):
            if target.startswith(("http://", "https://", "mailto:")):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists():
                problems.append(f"line {number}: {target}: no such file")
            elif anchor and anchor not in anchors(file):
                problems.append(f"line {number}: {target}: no such heading")
        problems += [f"line {number}: {path}" for path in REPOSITORY_PATH.findall(line) if not (ROOT / path).exists()]
    assert problems == []


def test_readme_has_at_most_150_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
