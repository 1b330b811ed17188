"""Rules of style that ruff does not have (docs/contributing/style.md).

`python tests/test_style.py [PATH ...]` prints the findings under these paths.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "phalanx"
FIRST_WORDS = {"Of", "What", "Who", "Whether", "Those", "As", "Around", "It", "They", "Whom", "Whose"}
"""Words that do not begin a docstring: it says what a function does, or names a thing."""
DIALECT = re.compile(
    r"\b(told|anew|mend(ed|s)?|whom|beside|leaves? word|stood still|stands still|so many|as many as there are|"
    r"held against|gone on from|goes on|passed over|set aside|begun|over against|(?<!there )is no)\b"
)
"""Words for which the field has a term."""
MAX_POSITIONAL = 3
LIBRARY_CALLS = re.compile(
    "print|min|max|zip|partial|chain|product|range|join|joinpath|Path|isinstance|date|TypeVar|select|submit|finalize|prctl|"
    "posix_fadvise|CompletedProcess|pack|pack_into|add_row|assemble|view|reshape|expand|permute|new_zeros|new_empty|"
    "rand|randn|zeros|ones|empty|stack|einsum|addcmul_|lerp_|apply|step|rms_norm|save_for_backward|all_to_all_single|"
    "__init__|__call__"
)
"""Calls of libraries with more arguments, and of what a superclass defines."""
FUNCTION_VARIABLES = {"attend", "make", "CPU_ATTENTION", "CUDA_ATTENTION"}
"""Functions that are called by a variable, whose arguments have no names."""

Finding = tuple[str, str, int]
"""A rule, where it is broken (a qualified name), and the line."""


def docstrings(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """Yield the name, line and docstring of the module, its classes, functions and attributes."""
    for parent in ast.walk(tree):
        if isinstance(parent, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for child in parent.body:
                if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                    text = child.value.value
                    if isinstance(text, str) and text.strip():
                        yield getattr(parent, "name", "module"), child.lineno, text


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each literal that people read: of several words, and no docstring."""
    read_as_docstring = {line for _, line, _ in docstrings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from [(node.lineno, node.value)] * (node.lineno not in read_as_docstring)


def is_unrelated_assignment(node: ast.AST) -> bool:
    """Whether one line assigns values to names that have nothing to do with each other."""
    if not (isinstance(node, ast.Assign) and len(node.targets) == 1):
        return False
    target, value = node.targets[0], node.value
    if not (isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)):
        return False
    assigned = {ast.unparse(name) for name in target.elts}
    used = {ast.unparse(name) for name in ast.walk(value) if isinstance(name, ast.Name | ast.Attribute)}
    return not assigned & used  # exchanged or advanced together: related


@cache
def variadic_functions() -> frozenset[str]:
    """Return the names of the package's functions that accept any number of positional arguments."""
    nodes = chain.from_iterable(ast.walk(ast.parse(path.read_text())) for path in SOURCE.rglob("*.py"))
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(function.name for function in functions if function.args.vararg)


def has_many_positional(node: ast.AST) -> bool:
    """Whether a call has more positional arguments than a reader can tell apart."""
    if not isinstance(node, ast.Call) or any(isinstance(argument, ast.Starred) for argument in node.args):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return len(node.args) > MAX_POSITIONAL and not (
        LIBRARY_CALLS.fullmatch(name) or name in FUNCTION_VARIABLES or name in variadic_functions()
    )


def findings(path: Path) -> list[Finding]:
    """Return what breaks a rule in a file."""
    tree = ast.parse(path.read_text())
    found = []
    for name, line, text in docstrings(tree):
        if text.split()[0].strip(",.:;") in FIRST_WORDS:
            found.append(("first word of a docstring", name, line))
        if DIALECT.search(text):
            found.append(("dialect in a docstring", name, line))
    found += [("dialect in a message", text[:40], line) for line, text in messages(tree) if DIALECT.search(text)]
    for node in ast.walk(tree):
        if is_unrelated_assignment(node):
            found.append(("unrelated assignments in one line", ast.unparse(node)[:40], node.lineno))
        if has_many_positional(node):
            found.append(("more than three positional arguments", ast.unparse(node.func)[:40], node.lineno))
    return found


@pytest.mark.parametrize("package", sorted(path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()))
def test_package_has_no_findings(package: str) -> None:
    found = {path: findings(path) for path in sorted((SOURCE / package).rglob("*.py"))}
    assert not {path.relative_to(SOURCE).as_posix(): broken for path, broken in found.items() if broken}


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ('def f():\n    """What ranks send."""', "first word of a docstring"),
        ('class C:\n    """Ranks that were told."""', "dialect in a docstring"),
        ('print("rank 3 is beside itself")', "dialect in a message"),
        ("a, b = 1, f(2)", "unrelated assignments in one line"),
        ("plan(run, 8, 20, True)", "more than three positional arguments"),
    ],
)
def test_findings_name_broken_rule(source: str, rule: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert [found for found, _, _ in findings(path)] == [rule]


@pytest.mark.parametrize("source", ["a, b = b, a", "a, b = f()", "plan(run, 8, 20, simple=True)", 'print("next to")'])
def test_findings_allow_related_assignments_and_keywords(source: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert findings(path) == []


def main() -> None:
    counts: Counter[str] = Counter()
    for root in map(Path, sys.argv[1:] or [SOURCE]):
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            for rule, where, line in findings(path):
                counts[rule] += 1
                print(f"{path}:{line}: {rule}: {where}")
    for rule, count in counts.most_common():
        print(f"{count:5d} {rule}")


if __name__ == "__main__":
    main()
