"""Rules of language (docs/contributing/style.md) that ruff does not have, in src/, tests/ and benchmarks/.

`python tests/test_style.py [PATH ...]` prints the findings under these paths.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FIRST_WORDS = {"Of", "What", "Who", "Whether", "Those", "As", "Around", "It", "They", "Whom", "Whose"}
"""Words that no docstring under src/ starts with: a docstring says what a function does, or names a thing."""
DIALECT = re.compile(
    r"\b(told|anew|mend(ed|s)?|whom|beside|leaves? word|stood still|stands still|so many|as many as there are|"
    r"held against|gone on from|goes on|passed over|set aside|begun|over against|(?<!there )is no)\b"
)
"""Words for which the field has a term."""
BRITISH = re.compile(
    r"\b(behaviour|colour|neighbour|favour|labell|modell|centre|catalogue|analyse|artefact|grey\b|"
    r"(initial|optim|serial|normal|organ|recogn|minim|maxim|util|summar|general)is(e|ed|es|ing|ation)\b)",
    re.IGNORECASE,
)
Finding = tuple[str, int, str]
"""Rule, line, and the text that breaks the rule."""


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the docstrings of the module, its classes, functions and attributes."""
    for parent in ast.walk(tree):
        if isinstance(parent, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for child in parent.body:
                text = child.value if isinstance(child, ast.Expr) else None
                if isinstance(text, ast.Constant) and isinstance(text.value, str) and text.value.strip():
                    yield text


def is_unrelated_assignment(node: ast.AST) -> bool:
    """Return whether one line assigns values to names that have nothing to do with each other."""
    if not (isinstance(node, ast.Assign) and len(node.targets) == 1):
        return False
    target, value = node.targets[0], node.value
    if not (isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)):
        return False
    assigned = {ast.unparse(name) for name in target.elts}
    used = {ast.unparse(name) for name in ast.walk(value) if isinstance(name, ast.Name | ast.Attribute)}
    return not assigned & used  # related, because they are exchanged or advanced together


def findings(path: Path, is_source: bool = True) -> Iterator[Finding]:
    """Yield the violations of a file. Rules of first words and assignments apply to src/ only."""
    tree = ast.parse(path.read_text())
    prose = list(docstrings(tree))
    for node in prose:
        if is_source and node.value.split()[0].strip(",.:;") in FIRST_WORDS:
            yield "first word of a docstring", node.lineno, node.value[:40]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if (node in prose or " " in node.value) and (match := DIALECT.search(node.value)):
                yield "dialect", node.lineno, match[0]
            if match := BRITISH.search(node.value):
                yield "British spelling", node.lineno, match[0]
        elif is_source and is_unrelated_assignment(node):
            yield "unrelated assignments in one line", node.lineno, ast.unparse(node)[:40]
        elif isinstance(node, ast.Name | ast.arg | ast.FunctionDef | ast.ClassDef | ast.Attribute):
            name = getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "attr", None) or node.name
            if match := BRITISH.search(name.replace("_", " ")):
                yield "British spelling", node.lineno, name


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks"])
def test_folder_has_no_findings(folder: str) -> None:
    files = [path for path in sorted((ROOT / folder).rglob("*.py")) if path != Path(__file__)]
    messages = [
        f"{path.relative_to(ROOT)}:{line}: {rule}: {text}"
        for path in files
        for rule, line, text in findings(path, is_source=folder == "src")
    ]
    assert messages == []


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ('def f():\n    """What ranks send."""', "first word of a docstring"),
        ('class C:\n    """Ranks that were told."""', "dialect"),
        ('print("rank 3 is beside itself")', "dialect"),
        ('{"labelled_rows": 3}', "British spelling"),
        ("utilisation = 3", "British spelling"),
        ("a, b = 1, f(2)", "unrelated assignments in one line"),
    ],
)
def test_findings_name_broken_rule(source: str, rule: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert [found_rule for found_rule, _, _ in findings(path)] == [rule]


@pytest.mark.parametrize("source", ["a, b = b, a", "a, b = f()", 'print("next to")', "parallelism = 2"])
def test_findings_allow_related_assignments_and_terms(source: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert list(findings(path)) == []


if __name__ == "__main__":
    for root in map(Path, sys.argv[1:] or [ROOT / "src"]):
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            for rule, line, text in findings(path):
                print(f"{path}:{line}: {rule}: {text}")
