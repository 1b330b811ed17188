"""Check of the user's own components before ranks start: they exist. Their code is not run here."""

from __future__ import annotations

import ast
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from phalanx.spec.components import ComponentSpec
from phalanx.spec.errors import UserError


def check_component(field: str, spec: ComponentSpec) -> None:
    """Raise UserError if a component does not exist.

    Modules inside packages are checked when ranks import them.

    Args:
        field: Field of the run file that names it.
        spec: Its description.
    """
    package = spec.module.partition(".")[0]
    found = PathFinder.find_spec(package, [os.getcwd(), *sys.path])
    if found is None:
        raise UserError(
            field,
            spec.class_path,
            f"belongs to a module that is neither in {os.getcwd()} nor installed",
            fix=f"start in the directory of {package}.py, or install its package",
        )
    if spec.module == package and found.origin is not None and found.origin.endswith(".py"):
        names = _top_level_names(ast.parse(Path(found.origin).read_text()))
        if spec.name not in names:
            fix = f"use one of {', '.join(sorted(names)) or 'its classes'}"
            raise UserError(field, spec.class_path, f"is not defined in {found.origin}", fix=fix)


def _top_level_names(tree: ast.Module) -> set[str]:
    """Return the names of classes, functions and imports at the top level of a module."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names
