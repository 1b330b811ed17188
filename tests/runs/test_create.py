"""Files of a run directory: those of the model that the run started from, and links in the place of files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.data.prepare import PreparedData
from phalanx.data.tokenizer import byte_tokenizer
from phalanx.runs.create import (
    DATA_FILE,
    FROM_HF_DIR,
    RUN_FILE,
    TOKENIZER_FILE,
    check_claimable,
    claim_run_directory,
    keep_hf_files,
    require_run,
    write_run_directory,
)
from phalanx.runs.measured import measured_file, write_measured
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table
from phalanx.spec.files.tables import MARKER_FILE
from phalanx.spec.run import RunSpec

FILES = {
    "config.json": '{"model_type": "llama"}',
    "tokenizer.model": "x",
    "additional_chat_templates/tool.jinja": "y",
    "LICENSE.txt": "z",
    "README.md": "a model card of other weights",
    "model.safetensors": "weights",
    "modeling_custom.py": "code",
}
KEPT = {"config.json", "tokenizer.model", "additional_chat_templates/tool.jinja", "LICENSE.txt"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / "source" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "source"


WRITTEN_FILES = (MARKER_FILE, RUN_FILE, DATA_FILE, TOKENIZER_FILE)


@pytest.mark.parametrize("exists", [False, True])
def test_files_of_a_run_directory_replace_links_in_their_place(exists: bool, tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path / "tokenizer.json")
    prefix = str(tmp_path / "text")
    run = run_from_table({"name": "mine", "output_dir": str(tmp_path), "data": {"tokenizer": "bytes"}})
    prepared = PreparedData(train=prefix, held_out=prefix, tokenizer=str(tmp_path / "tokenizer.json"))
    directory = write_run_directory(run, prepared)
    texts = {name: (directory / name).read_text() for name in WRITTEN_FILES}
    for name in WRITTEN_FILES[1:]:
        (directory / name).unlink()
        (directory / name).symlink_to(tmp_path / f"target-{name}")
        if exists:
            (tmp_path / f"target-{name}").write_text("mine")
    write_run_directory(run, prepared)
    assert {name: (directory / name).read_text() for name in WRITTEN_FILES} == texts
    assert not any(path.is_symlink() for path in directory.iterdir())
    assert {path.read_text() for path in tmp_path.glob("target-*")} == ({"mine"} if exists else set())


def test_measurements_replace_links_in_their_place(tmp_path: Path) -> None:
    (tmp_path / "measured").mkdir()
    measured_file(tmp_path, 0).symlink_to(tmp_path / "nowhere")
    write_measured(tmp_path, 0, {"step": 3})
    assert json.loads(measured_file(tmp_path, 0).read_text()) == {"step": 3}
    assert not (tmp_path / "nowhere").exists()


def build_run(from_hf: Path | None) -> RunSpec:
    tokenizer = {"data": {"tokenizer": "bytes"}}
    return run_from_table({"model": {"from_hf": str(from_hf)}, **tokenizer} if from_hf else tokenizer)


def kept_files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory / FROM_HF_DIR)) for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["", "config.json"])
def test_keep_hf_files_leaves_out_weights_code_and_model_card(source, tmp_path, name):
    keep_hf_files(build_run(source / name), tmp_path / "run")
    assert kept_files(tmp_path / "run") == KEPT


def test_keep_hf_files_replaces_those_of_a_start_without_checkpoint(source, tmp_path):
    keep_hf_files(build_run(source), tmp_path / "run")
    (source / "tokenizer.model").unlink()
    keep_hf_files(build_run(source), tmp_path / "run")
    assert kept_files(tmp_path / "run") == KEPT - {"tokenizer.model"}
    keep_hf_files(build_run(None), tmp_path / "run")
    assert not (tmp_path / "run" / FROM_HF_DIR).exists()


def test_keep_hf_files_changes_nothing_after_the_first_checkpoint(source, tmp_path):
    run = build_run(source)
    keep_hf_files(run, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-00000004").mkdir(parents=True)
    source.rename(tmp_path / "moved")
    keep_hf_files(run, tmp_path / "run")
    assert kept_files(tmp_path / "run") == KEPT


def test_directory_that_another_launcher_is_marking_can_be_claimed(tmp_path: Path) -> None:
    (tmp_path / f"{MARKER_FILE}.123.partial").touch()
    claim_run_directory(tmp_path)
    (tmp_path / "lock").touch()
    check_claimable(tmp_path)


@pytest.mark.parametrize(
    ("path", "problem", "fix"),
    [
        ("runs", "has no run.toml", "name a run in runs, such as runs/chat; `phalanx runs runs` lists them"),
        ("runs/chatt", "does not exist", "did you mean 'chat'?"),
        ("runs/zzz", "does not exist", "name a run in runs, such as runs/chat; `phalanx runs runs` lists them"),
        ("runs/chat/run.toml", "is a file", "use a run directory of phalanx train: runs/NAME"),
        ("nothing/chat", "does not exist", "use a run directory of phalanx train: runs/NAME"),
    ],
)
def test_path_without_a_run_names_the_run_that_was_perhaps_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, problem: str, fix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("chat", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.toml").write_text("")
    require_run(Path("runs/chat"))
    with pytest.raises(UserError) as caught:
        require_run(Path(path))
    assert (caught.value.problem, caught.value.fix) == (problem, fix)
