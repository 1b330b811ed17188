"""The names of `import phalanx` are lazy, documented, and have examples
that run. All examples share one trained run."""

from __future__ import annotations

import ast
import doctest
import inspect
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import phalanx

RUN_FILE = f"""
name = "first"
[model]
preset = "tiny"
hidden_size = 32
num_layers = 2
num_heads = 4
ffn_hidden_size = 48
[data]
train = ["{Path(json.__file__).parent}"]
tokenizer = "bytes"
cache = "cache"
[training]
steps = 8
seq_len = 32
tokens_per_step = 256
precision = "fp32"
[evaluation]
every = 8
tokens = 512
[cluster]
device = "cpu"
[recovery]
max_restarts = 0
"""
FUNCTIONS = [name for name in phalanx.__all__ if inspect.isfunction(getattr(phalanx, name))]
WITHOUT_ERRORS = {"generate"}
"""Functions that raise no UserError."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with run.toml and the trained run runs/first, which the examples of docstrings use."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "run.toml").write_text(RUN_FILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert phalanx.train_run("run.toml", quiet=True).exit_reason == "finished"
    return folder


def run_program(program: str) -> str:
    """Run a program in its own process, and return its output."""
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True)
    return done.stdout.strip()


def test_import_phalanx_imports_no_torch_numpy_or_pydantic():
    program = "import sys, phalanx; print(sorted({'numpy', 'pydantic', 'torch', 'typer'} & set(sys.modules)))"
    assert run_program(program) == "[]"


def test_planning_functions_import_no_torch():
    names = ("plan_run", "predict", "memory", "traffic", "read_run", "report_run", "diagnose", "train_run", "load_run")
    program = f"import sys, phalanx; [getattr(phalanx, name) for name in {names}]; print('torch' in sys.modules)"
    assert run_program(program) == "False"


def test_functions_stay_functions_when_modules_are_imported_before_or_after():
    imports = "import phalanx.plan.search.search as search, phalanx.train, phalanx.report.facts"
    use = "assert callable(phalanx.plan_run) and callable(phalanx.train_run) and callable(phalanx.report_run)"
    for lines in ((use, imports, use), (imports, use)):
        assert run_program("\n".join(["import phalanx", *lines, "print(search.search_layouts.__name__)"])) == (
            "search_layouts"
        )


def test_public_names_are_the_same_for_type_checkers_and_at_run_time():
    tree = ast.parse(Path(phalanx.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = {node.module: tuple(alias.name for alias in node.names) for node in block.body}  # type: ignore[attr-defined]
    assert imports == phalanx._PUBLIC_NAMES
    assert sorted(phalanx._MODULE_OF_NAME) == phalanx.__all__
    assert set(phalanx.__all__) <= set(dir(phalanx))


@pytest.mark.parametrize("name", phalanx.__all__)
def test_public_name_is_not_a_package(name: str):
    """Importing phalanx.NAME.MODULE would replace the function."""
    assert find_spec(f"phalanx.{name}") is None


def test_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'plan_runs'"):
        phalanx.plan_runs  # noqa: B018


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_function_documents_arguments_result_and_errors(name: str):
    function = getattr(phalanx, name)
    text = inspect.getdoc(function) or ""
    sections = dict(re.findall(r"^(Args|Returns|Raises):\n((?:    .*\n?|\n)+)", text, re.M))
    assert set(sections) == {"Args", "Returns", *([] if name in WITHOUT_ERRORS else ["Raises"])}
    documented = re.findall(r"^    (\w+): ", sections["Args"], re.M)
    assert documented == list(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", phalanx.__all__)
def test_example_of_public_name_runs(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    value: Any = getattr(phalanx, name)
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    namespace = {"phalanx": phalanx}
    if ">>>" in value.__doc__ and "torch" in value.__doc__:
        import torch

        namespace["torch"] = torch
    (example,) = doctest.DocTestFinder(recurse=False).find(value, name, globs=namespace)
    assert example.examples
    failures: list[str] = []
    doctest.DocTestRunner(optionflags=flags).run(example, out=failures.append)
    assert not failures, "".join(failures)


@pytest.mark.parametrize("make", ["plan", "layout", "report", "data"])
def test_results_show_tables_in_notebooks(make: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    plan = phalanx.plan_run(phalanx.load_run("run.toml", machine="h100"), 2, top=3)
    results: dict[str, Any] = {
        "plan": plan,
        "layout": plan.best,
        "report": phalanx.report_run("runs/first"),
        "data": phalanx.read_run("runs/first"),
    }
    assert len(repr(results[make])) < 2000
    html = results[make]._repr_html_()
    assert html.count("<table>") == html.count("</table>") >= 1
    assert html.count("<tr>") > 3
