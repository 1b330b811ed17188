"""List the pages of results whose measured code has changed since: python -m benchmarks.stale

A change may leave the figures as they are: the table says where to look first, with the most changed lines on top.
"""

from __future__ import annotations

import re

from benchmarks.pages import MEASURED, RESULTS, git

COMMIT = re.compile(r"^Figures of commit ([0-9a-f]{7,40})\b.*, (\d{4}-\d\d-\d\d)\.$", re.MULTILINE)


def main() -> None:
    """Print a row for each page, the most changed first."""
    rows = []
    for name, paths in MEASURED.items():
        commit, day = page_commit(name)
        sources = [f"src/phalanx/{path}" for path in paths]
        commits = git("rev-list", f"{commit}..HEAD", "--", *sources).split()
        lines = sum(
            int(count) for count in re.findall(r"(\d+) (?:ins|del)", git("diff", "--shortstat", commit, "--", *sources))
        )
        rows.append((lines, len(commits), name, commit, day, " ".join(paths)))
    print(f"{'page of docs/results':<32}{'commit':<10}{'day':<12}{'commits':>8}{'lines':>8}  measured, in src/phalanx")
    for lines, commits, name, commit, day, measured in sorted(rows, reverse=True):
        print(f"{name:<32}{commit:<10}{day:<12}{commits:>8}{lines:>8}  {measured}")


def page_commit(name: str) -> tuple[str, str]:
    """Return the commit of a page's figures, and their day."""
    match = COMMIT.search((RESULTS / name).read_text())
    if match is None:
        raise ValueError(
            f"docs/results/{name} does not end with the commit of its figures (benchmarks.pages.write_results)"
        )
    return match[1], match[2]


if __name__ == "__main__":
    main()
