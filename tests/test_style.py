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

MAX_UNDOCUMENTED_PARAMETERS = 2
Function = ast.FunctionDef | ast.AsyncFunctionDef

MAX_POSITIONAL_FIELDS = 4
MAX_TUPLE_TYPES = 3
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


def parameter_names(function: Function) -> list[str]:
    """Return the names of the parameters without self and cls; *args and **kwargs do not count."""
    parameters = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    return [parameter.arg for parameter in parameters if parameter.arg not in ("self", "cls")]


def has_args(function: Function) -> bool:
    """Whether the docstring has a section of the arguments."""
    return re.search(r"^Args:$", ast.get_docstring(function) or "", re.MULTILINE) is not None


@cache
def package_classes() -> dict[str, ast.ClassDef]:
    """Return the classes of the package by name."""
    nodes = chain.from_iterable(ast.walk(ast.parse(path.read_text())) for path in SOURCE.rglob("*.py"))
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def overrides_documented_method(function: Function, owner: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> bool:
    """Whether a base class in `classes` documents the arguments of the same method, with the same parameters."""
    bases = [classes[name] for name in map(last_name, owner.bases) if name in classes]
    documented = (
        method.name == function.name and parameter_names(method) == parameter_names(function) and has_args(method)
        for base in bases
        for method in base.body
        if isinstance(method, Function)
    )
    return any(documented) or any(overrides_documented_method(function, base, classes) for base in bases)


def last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name, without the parameters of a generic class."""
    return ast.unparse(node).partition("[")[0].rpartition(".")[2]


def is_autograd_method(function: Function, owner: ast.ClassDef) -> bool:
    """Whether PyTorch defines the arguments: those of an autograd function's passes."""
    is_autograd_function = any(last_name(base).endswith("Function") for base in owner.bases)
    return is_autograd_function and function.name in ("forward", "backward", "setup_context")


def is_command(function: Function, path: Path) -> bool:
    """Whether the docstring is a command's help text, whose options have their own help.

    A command has a decorator of typer, parameters that are typer's, or the name of its file in cli/commands."""
    decorators = (node.func if isinstance(node, ast.Call) else node for node in function.decorator_list)
    if any(last_name(decorator) in ("command", "callback") for decorator in decorators):
        return True
    is_named_as_file = path.parent.name == "commands" and path.stem == function.name
    return is_named_as_file or re.search(r"\btyper\.(Option|Argument)\b", ast.unparse(function.args)) is not None


def public_functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function, ast.ClassDef | None]]:
    """Yield the qualified name, node and class of functions and of methods of public classes, without nested ones."""
    for node in ast.iter_child_nodes(tree):
        name = getattr(node, "name", "")
        if isinstance(node, Function) and not name.startswith("_"):
            yield f"{prefix}{name}", node, tree if isinstance(tree, ast.ClassDef) else None
        elif isinstance(node, ast.ClassDef) and not name.startswith("_"):
            yield from public_functions(node, f"{prefix}{name}.")


def functions_without_args(tree: ast.Module, path: Path) -> Iterator[tuple[str, int]]:
    """Yield the name and line of public functions whose arguments are not documented."""
    classes = package_classes() | {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for name, function, owner in public_functions(tree):
        if len(parameter_names(function)) <= MAX_UNDOCUMENTED_PARAMETERS or has_args(function):
            continue
        if is_command(function, path):
            continue
        if owner and (is_autograd_method(function, owner) or overrides_documented_method(function, owner, classes)):
            continue
        yield name, function.lineno


def is_positional_dataclass(node: ast.AST) -> bool:
    """Return whether a class is a dataclass of more than four fields that takes positional arguments."""
    if not isinstance(node, ast.ClassDef):
        return False
    decorators = [ast.unparse(each) for each in node.decorator_list if "dataclass" in ast.unparse(each)]
    num_fields = sum(isinstance(each, ast.AnnAssign) for each in node.body)
    return bool(decorators) and "kw_only=True" not in decorators[0] and num_fields > MAX_POSITIONAL_FIELDS


def long_tuples(function: Function) -> Iterator[str]:
    """Yield the tuples of more than three types in a signature, except those of autograd, pickle and sort keys."""
    if function.name in ("backward", "__reduce__", "key"):
        return
    arguments = function.args
    annotations = [each.annotation for each in (*arguments.args, *arguments.kwonlyargs)]
    for annotation in [*annotations, function.returns]:
        for node in ast.walk(annotation) if annotation is not None else ():
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "tuple":
                types = node.slice.elts if isinstance(node.slice, ast.Tuple) else []
                if len(types) > MAX_TUPLE_TYPES:
                    yield ast.unparse(node)


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
        if is_positional_dataclass(node):
            found.append(("dataclass of more than four fields without kw_only", node.name, node.lineno))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found += [
                ("tuple of more than three types in a signature", text, node.lineno) for text in long_tuples(node)
            ]
    found += [
        ("three or more parameters without Args", name, line) for name, line in functions_without_args(tree, path)
    ]
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
        ('def f(a, b, *, c):\n    """Return a + b + c."""', "three or more parameters without Args"),
        ('class C:\n    def f(self, a, b, c):\n        """Return a."""', "three or more parameters without Args"),
        (
            "@dataclass\nclass C:\n    a: int\n    b: int\n    c: int\n    d: int\n    e: int",
            "dataclass of more than four fields without kw_only",
        ),
        ("def _f() -> list[tuple[int, int, int, str]]: ...", "tuple of more than three types in a signature"),
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


ARGS = "Return a.\\n\\n    Args:\\n        a: A.\\n        b: B.\\n        c: C.\\n    "


@pytest.mark.parametrize(
    "source",
    [
        f'def f(a, b, c):\n    """{ARGS}"""',
        "def f(a, b):\n    def g(a, b, c): ...",
        "def _f(a, b, c): ...",
        "class C:\n    def f(self, a, b): ...",
        "@app.command()\ndef f(a, b, c): ...",
        "def f(a: Annotated[int, typer.Option()], b, c): ...",
        "class F(torch.autograd.Function):\n    def forward(ctx, x, y): ...",
        f'class A:\n    def f(self, a, b, c):\n        """{ARGS}"""\nclass B(A):\n    def f(self, a, b, c): ...',
    ],
)
def test_findings_allow_functions_with_args_and_exceptions(source: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert findings(path) == []


def test_findings_name_override_with_other_parameters(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    base = f'class A:\n    def f(self, a, b, c):\n        """{ARGS}"""\n'
    path.write_text(f"{base}class B(A):\n    def f(self, a, b, d): ...")
    assert [(rule, name) for rule, name, _ in findings(path)] == [("three or more parameters without Args", "B.f")]


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
