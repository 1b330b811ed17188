"""Count the rows of the rename plan that the code carries out, and list those that it does not.

    python tools/check_renames.py [../shared/redesign]

A row of renames.tsv is executed if its new name is defined in its new file, moved if another file defines it, changed
if tools/renames_changed.tsv names a better one. A row of moves.tsv is executed if the new path exists. Exits with 1 if
a row is none of these, or if a file of src/phalanx is neither in moves.tsv nor in tools/new_files.tsv."""

from __future__ import annotations

import ast
import csv
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "phalanx"


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a tab-separated table with a header."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def defined_names(path: Path) -> Iterator[str]:
    """Yield every name that a file binds: functions, classes, variables, parameters, and attributes of objects."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def main(plan: Path) -> int:
    """Print the counts and the rows that are not executed; return the exit code."""
    names = {path.relative_to(PACKAGE).as_posix(): set(defined_names(path)) for path in PACKAGE.rglob("*.py")}
    everywhere = set().union(*names.values())
    better = {(row["old_file"], row["old_name"]): row for row in read_rows(ROOT / "tools" / "renames_changed.tsv")}
    counts: Counter[str] = Counter()
    open_rows = []
    for row in read_rows(plan / "renames.tsv"):
        changed = better.get((row["old_file"], row["old_name"]))
        new = (changed["name"] if changed else row["new_name"]).rpartition(".")[2]
        if changed:
            state = "deleted" if not new else "changed" if new in everywhere else "open"
        else:
            state = "executed" if new in names.get(row["new_file"], ()) else "moved" if new in everywhere else "open"
        counts[state] += 1
        if state == "open":
            open_rows.append(f"{row['old_file']}: {row['old_name']} -> {row['new_name']}")
    print("renames.tsv:", ", ".join(f"{count} {state}" for state, count in sorted(counts.items())))
    moves = read_rows(plan / "moves.tsv")
    added = {row["path"]: row for row in read_rows(ROOT / "tools" / "new_files.tsv")}
    replaced = {path for row in added.values() for path in (row["replaces"] or "").split()}
    missing = [row["new_path"] for row in moves if not (PACKAGE / row["new_path"]).exists()]
    open_moves = [path for path in missing if path not in replaced]
    print(f"moves.tsv: {len(moves) - len(missing)} executed, {len(missing)} to a better path")
    planned = {row["new_path"] for row in moves}
    strangers = [path for path in names if path not in planned and path not in added]
    print(f"files of src/phalanx: {len(names)}, {len(set(names) - planned)} of them not in moves.tsv")
    for row in (*better.values(), *added.values()):
        print("  ", "  ".join(value for value in row.values() if value))
    for line in (*open_rows, *open_moves, *strangers):
        print("open:", line)
    return int(bool(open_rows or open_moves or strangers))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT.parent / "shared" / "redesign")))
