"""`phalanx generate` and `phalanx export`, on a run directory with untrained weights."""

import json

import pytest
from typer.testing import CliRunner

from phalanx.cli.generate import pieces
from phalanx.cli.main import app
from phalanx.data.tokenizer import byte_tokenizer
from phalanx.model.transformer import Transformer
from phalanx.model.weights import initial_weight
from phalanx.spec.errors import UserError
from phalanx.spec.load import build_run


@pytest.fixture
def run_directory(tmp_path, monkeypatch):
    run = build_run({"model": {"preset": "tiny", "vocab": 257, "width": 32, "heads": 2, "ffn": 48, "layers": 1}})
    model = Transformer(run.model)
    for name, parameter in model.named_parameters():
        parameter.data = initial_weight(run.model, name, parameter.shape, 0)
    path = tmp_path / "tokenizer.json"
    byte_tokenizer().save(path)
    monkeypatch.setattr("phalanx.train.checkpoint.load_trained", lambda directory: (run, model, path))
    return tmp_path


def said(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_generate_continues_the_prompt(run_directory):
    text = said("generate", run_directory, "--prompt", "def ", "--tokens", 20)
    assert text.startswith("def ")
    assert text == said("generate", run_directory, "--prompt", "def ", "--tokens", 20, "--seed", 0)
    assert text != said("generate", run_directory, "--prompt", "def ", "--tokens", 20, "--seed", 1)
    assert said("generate", run_directory, "--tokens", 20, "--temperature", 0).endswith("\n")


def test_a_character_waits_for_its_last_byte():
    euro = list("€".encode())
    assert list(pieces(byte_tokenizer(), [65], [66, *euro, 67])) == ["B", "€", "C"]


def test_export_writes_what_hugging_face_reads(run_directory):
    text = said("export", run_directory, "--to", "hf", run_directory / "out", "--dtype", "bf16")
    assert "parameters in bf16" in text
    config = json.loads((run_directory / "out" / "config.json").read_text())
    assert (config["model_type"], config["eos_token_id"], config["torch_dtype"]) == ("qwen3", 256, "bfloat16")
    with pytest.raises(UserError, match="not empty"):
        said("export", run_directory, "--to", "hf", run_directory / "out")
    with pytest.raises(UserError, match="not a known format"):
        said("export", run_directory, "--to", "gguf", run_directory / "other")
