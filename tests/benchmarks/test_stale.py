"""Pages of results say their commit, and which sources their figures depend on."""

from __future__ import annotations

import re

import pytest

from benchmarks import stale
from benchmarks.pages import MEASURED, RESULTS, ROOT, git, write_results

LISTS_OF_PAGES = {"benchmarks/index.md", "benchmarks/gpu.md"}


def test_each_result_page_declares_sources_that_exist():
    pages = {str(page.relative_to(RESULTS)) for page in RESULTS.rglob("*.md")}
    assert pages - LISTS_OF_PAGES == set(MEASURED)
    missing = [path for paths in MEASURED.values() for path in paths if not (ROOT / "src" / "phalanx" / path).exists()]
    assert missing == []


@pytest.mark.parametrize("page", MEASURED)
def test_result_page_says_commit_of_its_figures(page: str):
    """A commit that was rebased away still exists where it was made, but in no clone."""
    commit, _ = stale.page_commit(page)
    assert not git("rev-parse", "HEAD") or git("merge-base", commit, "HEAD").startswith(commit)


def test_benchmarks_write_the_commit_of_their_figures(tmp_path, monkeypatch):
    write_results(tmp_path / "benchmarks" / "page.md", "# Title\n")
    monkeypatch.setattr(stale, "RESULTS", tmp_path)
    assert (tmp_path / "benchmarks" / "page.md").read_text().startswith("# Title\n\nFigures of commit ")
    head = git("rev-parse", "--short=8", "HEAD").strip()
    if head:
        assert stale.page_commit("benchmarks/page.md")[0] == head


def test_changes_since_a_page_are_counted(capsys):
    stale.main()
    rows = {row.split()[0]: row.split() for row in capsys.readouterr().out.splitlines()[1:]}
    _, commit, _, commits, lines, *_ = rows["benchmarks/faults.md"]
    log = git(
        "log",
        "--oneline",
        f"{commit}..HEAD",
        "--",
        *(f"src/phalanx/{path}" for path in MEASURED["benchmarks/faults.md"]),
    )
    assert int(commits) == len(log.splitlines())
    assert int(lines) > 0 or not log
    assert all(re.fullmatch(r"\d+", row[4]) for row in rows.values())
