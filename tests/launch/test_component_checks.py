"""Look-up of the user's components in their files, without running them."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from phalanx.launch.component_checks import check_component
from phalanx.spec.components import ComponentSpec
from phalanx.spec.errors import UserError

MODULE = """
import json
from os import path as renamed
raise RuntimeError("the module is not run")

class Defined: ...
def function(): local = 1
assigned: int = 1
try:
    from fast import Optional
except ImportError:
    class Optional: ...
if True:
    conditional = Defined
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the working directory."""
    (tmp_path / "my_parts.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


def check(path: str) -> None:
    check_component("training.loss", ComponentSpec.model_validate({"class": path}))


@pytest.mark.parametrize("name", ["Defined", "function", "assigned", "Optional", "conditional", "json", "renamed"])
def test_check_component_finds_name_without_running_module(name: str) -> None:
    check(f"my_parts:{name}")


def test_check_component_finds_package_in_editable_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a package may be found by a finder of its own, not in a directory of sys.path."""

    class Finder:
        def find_spec(self, name: str, path: None) -> ModuleSpec | None:
            return spec_from_file_location(name, tmp_path / "my_parts.py") if name == "elsewhere" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    check("elsewhere:Defined")


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("no_such_module:f", "belongs to a module that is neither in .* nor installed"),
        ("my_parts:local", "is not defined in .*my_parts.py\n  fix: use one of Defined, Optional"),
        ("my_parts:path", "is not defined in .*my_parts.py"),
    ],
)
def test_check_component_rejects_missing_module_or_name(path: str, problem: str) -> None:
    with pytest.raises(UserError, match=rf"training\.loss = '{path}' {problem}"):
        check(path)


@pytest.mark.parametrize("text", ["from os.path import *", "def __getattr__(name): ..."])
def test_check_component_accepts_module_whose_names_are_unknown(text: str, tmp_path: Path) -> None:
    (tmp_path / "my_parts.py").write_text(text)
    check("my_parts:join")


def test_check_component_reports_syntax_error(tmp_path: Path) -> None:
    (tmp_path / "my_parts.py").write_text("def broken(:")
    with pytest.raises(
        UserError, match=r"training\.loss = 'my_parts:broken' .*syntax error.*\n  fix: correct .*my_parts.py"
    ):
        check("my_parts:broken")
