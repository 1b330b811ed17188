"""Files of the model that a run started from, kept in its directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.runs.create import FROM_HF_DIR, keep_hf_files
from phalanx.spec.files.load import run_from_table
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
