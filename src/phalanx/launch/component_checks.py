"""Check that the user's own components exist before ranks start, without running their code."""

from __future__ import annotations

import ast
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from phalanx.spec.components import ComponentSpec, require_trusted
from phalanx.spec.errors import UserError


def check_component(field: str, spec: ComponentSpec) -> None:
    """Raise UserError if a component does not exist, or is not trusted.

    Modules inside packages are checked when ranks import them.
    """
    require_trusted(field, spec)
    package = spec.module.partition(".")[0]
    # Packages that are installed in editable mode have finders of their own.
    finders = (finder.find_spec(package, None) for finder in sys.meta_path)
    module_spec = PathFinder.find_spec(package, [os.getcwd()]) or next(filter(None, finders), None)
    if module_spec is None:
        problem = f"belongs to a module that is neither in {os.getcwd()} nor installed"
        fix = f"start in the directory of {package}.py, or install its package"
        raise UserError(field, spec.class_path, problem, fix)
    if spec.module == package and module_spec.origin is not None and module_spec.origin.endswith(".py"):
        try:
            names = _find_top_level_names(ast.parse(Path(module_spec.origin).read_bytes()))
        except SyntaxError as error:
            problem = f"belongs to a module with a syntax error: {error}"
            raise UserError(field, spec.class_path, problem, f"correct {module_spec.origin}") from None
        if not names & {spec.name, "*", "__getattr__"}:
            fix = f"use one of {', '.join(sorted(names)) or 'its classes'}"
            raise UserError(field, spec.class_path, f"is not defined in {module_spec.origin}", fix)


def _find_top_level_names(tree: ast.Module) -> set[str]:
    """Return the names that a module defines or imports outside of classes and functions; "*" if it imports all."""
    names = set()
    nodes: list[ast.AST] = [*tree.body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:  # such as "if" and "try"
            nodes += ast.iter_child_nodes(node)
    return names
