"""Someone else's run directory: no command and no function runs the code that it names, unless it is trusted."""

from __future__ import annotations

import ast
import json
import os
import shutil
import sys
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w

import phalanx
from phalanx.api.components import FIELDS
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run
from phalanx.spec.files.write import to_toml
from phalanx.swarm import join
from phalanx.train import worker
from phalanx.train.create_run import create_run
from phalanx.train.rank_options import RankOptions
from tests.helpers.cli_runner import command_output
from tests.helpers.small_runs import make_trainer, small_run, train_to_end

PAYLOAD = """
from pathlib import Path

import torch

Path(__file__).with_name("code ran").touch()


class Net(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table = torch.nn.Embedding(257, 257)

    def forward(self, tokens):
        return self.table(tokens)
"""
MODULE = "r1.payload:Net"
HUB = {"class": "torch.hub:load", "source": "local", "model": "Net"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run of Phalanx's own transformer."""
    changes = {"training.precision": "fp32", "training.steps": 1, "data.mask_documents": False}
    run = small_run(Path(json.__file__).parent, tmp_path_factory.mktemp("trained"), changes)
    create_run(run, 1, resume=False)
    trainer = make_trainer(run)
    train_to_end(trainer)
    return trainer.directory


@pytest.fixture
def theirs(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy with a payload next to the run file, which does not name it yet. The working directory is its parent."""
    directory = tmp_path / "r1"
    shutil.copytree(trained, directory)
    for name in ("payload.py", "hubconf.py"):
        (directory / name).write_text(PAYLOAD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("r1", "r1.payload"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return Path("r1")


def name_component(directory: Path, field: str, component: Any) -> None:
    """Name a component in the run file of a directory."""
    file = directory / "run.toml"
    table = tomllib.loads(file.read_text())
    section, _, name = field.partition(".")
    table.setdefault(section, {})[name] = component
    file.write_text(tomli_w.dumps(table))


ATTEMPTS: dict[str, Callable[[Path], object]] = {
    "generate": lambda run: command_output("generate", run, "--tokens", 1),
    "export": lambda run: command_output("export", run, "written"),
    "train": lambda run: command_output("train", run, "--resume"),
    "train file": lambda run: command_output("train", run / "run.toml", "--resume"),
    "train --print-config": lambda run: command_output("train", run, "--resume", "--print-config"),
    "dryrun": lambda run: command_output("dryrun", run / "run.toml", "--ranks", 1),
    "launch": lambda run: command_output("launch", run / "run.toml", "--to", "slurm", "--nproc", 1),
    "a rank": lambda run: worker.run_rank(run, RankOptions(resume=True, device="cpu")),
    "a rank, file": lambda run: worker.run_rank(run / "run.toml", RankOptions(resume=True, device="cpu", force=True)),
    "load_model": phalanx.load_model,
    "dry_run": lambda run: phalanx.dry_run(phalanx.load_run(run / "run.toml"), 1),
    "dry_run of a record": lambda run: phalanx.dry_run(phalanx.read_run(run).run, 1),  # type: ignore[arg-type]
    "train_run": lambda run: phalanx.train_run(run, nproc=1, resume=True, quiet=True),
    "train_run of a record": lambda run: phalanx.train_run(
        phalanx.read_run(run).run.replace(name="mine"),  # type: ignore[union-attr]
        nproc=1,
        quiet=True,
    ),
}
"""Commands and functions that run components."""
READERS: dict[str, Callable[[Path], object]] = {
    "report": lambda run: command_output("report", run),
    "debug": lambda run: command_output("debug", run),
    "experts": lambda run: command_output("experts", run),
    "calibrate": lambda run: command_output("calibrate", run, "--out", "machine.toml"),
    "memory": lambda run: command_output("memory", run / "run.toml", "--ranks", 1),
    "mesh": lambda run: command_output("mesh", run / "run.toml", "--ranks", 1),
    "plan": lambda run: command_output("plan", run / "run.toml", "--machine", "h100", "--nodes", 1, "--nproc", 1),
    "advise": lambda run: command_output("advise", run / "run.toml", "--machine", "h100", "--nodes", 1),
    "placement": lambda run: command_output("placement", run / "run.toml", "--ranks", 2),
    "pipeline split": lambda run: command_output("pipeline", "split", run / "run.toml", "--stages", 2),
    "report_run": phalanx.report_run,
    "diagnose": phalanx.diagnose,
    "load_model_spec": lambda run: phalanx.load_model_spec(str(run / "run.toml")),
}
"""Commands and functions that describe a run."""


def attempt(entry_point: Callable[[Path], object], theirs: Path) -> str:
    """Return the message with which an entry point refuses a directory, or "" if it accepts it."""
    try:
        entry_point(theirs)
    except UserError as error:
        return str(error)
    return ""


def assert_no_code_ran(theirs: Path) -> None:
    assert not list(theirs.rglob("code ran"))


@pytest.mark.parametrize(
    ("name", "component"),
    [*((name, MODULE) for name in ATTEMPTS), ("generate", HUB), ("export", HUB), ("load_model", HUB), ("a rank", HUB)],
    ids=lambda value: value if isinstance(value, str) else value["class"],
)
def test_untrusted_network_is_refused_before_it_is_imported(
    name: str, component: Any, theirs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if isinstance(component, dict):
        component = {**component, "repo_or_dir": str(theirs.resolve())}
    name_component(theirs, "model.implementation", component)
    message = attempt(ATTEMPTS[name], theirs) or capfd.readouterr().err  # a rank prints it
    assert_no_code_ran(theirs)
    class_path = component if isinstance(component, str) else component["class"]
    assert f"model.implementation = '{class_path}'" in message
    assert str(theirs.resolve() / "run.toml") in message
    assert "fix: read that code, then" in message


@pytest.mark.parametrize("name", READERS)
def test_reading_a_run_imports_no_component(name: str, theirs: Path) -> None:
    for field in (*FIELDS.values(), "callbacks.mine"):
        name_component(theirs, field, MODULE)
    with suppress(SystemExit, UserError, AssertionError):  # some refuse such a run
        READERS[name](theirs)
    assert_no_code_ran(theirs)


@pytest.mark.parametrize("field", [*FIELDS.values(), "callbacks.mine"])
def test_every_component_of_a_run_directory_is_refused(
    field: str, theirs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name_component(theirs, field, MODULE)
    message = attempt(ATTEMPTS["train"], theirs)
    assert f"{field} = '{MODULE}'" in message
    assert "--trust" in message
    ATTEMPTS["a rank"](theirs)
    assert f"{field} = '{MODULE}'" in capfd.readouterr().err
    assert_no_code_ran(theirs)


def test_run_directory_without_its_marker_is_not_trusted(theirs: Path) -> None:
    name_component(theirs, "model.implementation", MODULE)
    (theirs / "phalanx.json").unlink()
    for name in ("generate", "load_model", "train", "train file", "dryrun"):
        assert "model.implementation" in attempt(ATTEMPTS[name], theirs)
    assert_no_code_ran(theirs)


def test_run_file_cannot_declare_itself_trusted(theirs: Path) -> None:
    for claim in ("", "run.toml"):
        name_component(theirs, "model.implementation", {"class": MODULE, "named_in": claim, "_named_in": ""})
        assert "model.implementation" in attempt(phalanx.load_model, theirs)
    os.symlink(theirs / "run.toml", "mine.toml")
    with pytest.raises(UserError, match=r"model\.implementation"):
        command_output("dryrun", "mine.toml", "--ranks", 1)
    assert_no_code_ran(theirs)


def test_trust_loads_components_of_a_run_directory(theirs: Path) -> None:
    name_component(theirs, "model.implementation", MODULE)
    with pytest.raises(UserError, match=r"checkpoint"):  # the saved weights are the transformer's
        phalanx.load_model(theirs, trust=True)
    assert list(theirs.rglob("code ran"))


def test_component_of_the_users_own_command_needs_no_trust(theirs: Path) -> None:
    name_component(theirs, "model.implementation", MODULE)
    file = theirs / "run.toml"
    assert (
        load_run(file, ["model.implementation=r1.payload:Net"]).model.implementation
        == load_run(file, trust=True).model.implementation
    )
    environment = {"PHALANX_MODEL__IMPLEMENTATION": MODULE}
    assert load_run(file, environment=environment).model.implementation.named_in is None  # type: ignore[union-attr]
    changed = load_run(file, ["model.implementation.hidden=3"]).model.implementation
    assert changed is not None
    assert changed.named_in == str(file.resolve())
    assert changed.arguments == {"hidden": 3}


def test_users_own_run_file_is_trusted_and_its_directory_keeps_its_comments(theirs: Path, tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(PAYLOAD)
    recorded = load_run(theirs / "run.toml", [f"output_dir={tmp_path}/runs", "model.implementation=parts:Net"])
    own = tmp_path / "own.toml"
    own.write_text(to_toml(recorded))
    directory = create_run(load_run(own), 1, resume=False)
    file = directory / "run.toml"
    file.write_text("# my comment\n" + file.read_text())
    create_run(load_run(own), 1, resume=True)
    assert file.read_text().startswith("# my comment")
    assert "named_in" not in file.read_text()


IMPORTERS = {
    "__init__.py": "public names",
    "cli/main.py": "commands",
    "data/compression.py": "compression libraries",
    "data/places.py": "packages of its table of file systems",
    "launch/fork_server.py": "modules that the launcher names",
    "model/mixers/__init__.py": "files of its own folder",
    "spec/families/registry.py": "files of its own folder",
    "train/components.py": "components of the user, after require_trusted",
}
"""Modules of Phalanx that import a module whose name is not a constant."""


def test_only_the_importer_of_components_imports_by_name() -> None:
    source = Path(phalanx.__file__).parent
    importers = set()
    for file in source.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and not all(isinstance(part, ast.Constant) for part in node.args):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in ("import_module", "__import__", "spec_from_file_location", "run_path"):
                    importers.add(str(file.relative_to(source)))
    assert importers == set(IMPORTERS)


@pytest.mark.parametrize("swarm", [True, False])
def test_swarm_node_refuses_components_of_its_coordinator(swarm: bool, theirs: Path, tmp_path: Path) -> None:
    name_component(theirs, "model.implementation", MODULE)
    table = tomllib.loads((theirs / "run.toml").read_text()) | ({"swarm": {"method": "diloco"}} if swarm else {})
    link = SimpleNamespace(join=lambda: {"run": tomli_w.dumps(table)})
    with pytest.raises(UserError, match=r"not supported in a swarm|swarm is missing in the coordinator's run"):
        join._receive_run(link, tmp_path, "node", [])  # type: ignore[arg-type]
    assert_no_code_ran(theirs)
