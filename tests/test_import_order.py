"""Rooms import what the table of docs/architecture.md says they may."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = re.findall(r"^\| `(\w+)/` \|.*\| ([^|]+) \|$", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
ROOMS = [room for room, _ in ROWS]


def allowed(room: str, rule: str) -> set[str]:
    whole = {"all above": set(ROOMS[: ROOMS.index(room)]), "everything": set(ROOMS)}
    named = rule.partition(";")[0]
    return whole.get(named, set(re.findall(r"[a-z]+", named)) & set(ROOMS)) | {room}


def imported(file: Path) -> set[str]:
    """Modules that a file names, wherever it imports them."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    whole = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return whole | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def test_every_room_is_in_the_table():
    folders = {path.parent.name for path in (ROOT / "src" / "phalanx").glob("*/__init__.py")}
    assert folders == set(ROOMS)


@pytest.mark.parametrize(("room", "rule"), ROWS)
def test_a_room_imports_what_it_may(room, rule):
    may = allowed(room, rule)
    for file in (ROOT / "src" / "phalanx" / room).rglob("*.py"):
        for module in imported(file):
            package, _, rest = module.partition(".")
            assert package != "torch" or "no torch" not in rule, f"{file} imports torch"
            assert package != "phalanx" or not rest or rest.partition(".")[0] in may, f"{file} imports {module}"
