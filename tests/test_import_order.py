"""Packages import only packages above them in the table of docs/design/architecture.md, as the table allows."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = re.findall(
    r"^\| `(\w+)/` \|.*\| ([^|]+) \|$", (ROOT / "docs" / "design" / "architecture.md").read_text(), re.MULTILINE
)
PACKAGES = [package for package, _ in ROWS]


def allowed_imports(package: str, rule: str) -> set[str]:
    """Return the packages that a package may import."""
    above = set(PACKAGES[: PACKAGES.index(package)])
    names = rule.partition(";")[0]
    if names in ("all above", "everything"):
        return above
    return set(re.findall(r"[a-z]+", names)) & set(PACKAGES)


def imported_modules(file: Path) -> set[str]:
    """Return the modules that a file imports, including imports inside functions."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return modules | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def test_architecture_table_lists_every_package():
    folders = {path.parent.name for path in (ROOT / "src" / "phalanx").glob("*/__init__.py")}
    assert folders == set(PACKAGES)


@pytest.mark.parametrize(("package", "rule"), ROWS)
def test_architecture_table_allows_only_packages_above(package, rule):
    assert allowed_imports(package, rule) <= set(PACKAGES[: PACKAGES.index(package)])


@pytest.mark.parametrize(("package", "rule"), ROWS)
def test_package_imports_follow_architecture_table(package, rule):
    allowed = allowed_imports(package, rule) | {package}
    for file in (ROOT / "src" / "phalanx" / package).rglob("*.py"):
        for module in imported_modules(file):
            root, _, rest = module.partition(".")
            assert root != "torch" or "no torch" not in rule, f"{file} imports torch"
            assert root != "phalanx" or not rest or rest.partition(".")[0] in allowed, f"{file} imports {module}"
