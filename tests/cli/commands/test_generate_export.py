"""`phalanx generate` and `phalanx export`, on a run that was trained and saved."""

import json
import math
from pathlib import Path

import pytest
import torch

from phalanx.cli.commands.generate import pieces
from phalanx.data.tokenizer import byte_tokenizer
from phalanx.model.sampling import generate
from phalanx.spec.errors import UserError
from phalanx.train.create_run import create_run
from phalanx.train.progress import ProgressDisplay
from tests.helpers.cli_runner import command_output
from tests.helpers.small_runs import make_trainer, small_run

SHORT_TRAINING = {"training.precision": "fp32", "training.steps": 12}


@pytest.fixture(scope="module")
def finished_trainer(tmp_path_factory):
    """A trainer that has done its steps, with the directory it left."""
    run = small_run(Path(json.__file__).parent, tmp_path_factory.mktemp("trained"), SHORT_TRAINING)
    create_run(run, 1, resume=False)
    under_way = make_trainer(run)
    under_way.train([], ProgressDisplay(0, run.training.steps, quiet=True))
    under_way.module.eval()
    return under_way


@pytest.fixture
def run_directory(finished_trainer):
    return finished_trainer.directory


def test_generate_continues_prompt_deterministically_per_seed(run_directory):
    text = command_output("generate", run_directory, "--prompt", "def ", "--tokens", 20)
    assert text.startswith("def ")
    assert text == command_output("generate", run_directory, "--prompt", "def ", "--tokens", 20, "--seed", 0)
    assert text != command_output("generate", run_directory, "--prompt", "def ", "--tokens", 20, "--seed", 1)
    assert command_output("generate", run_directory, "--tokens", 20, "--temperature", 0).endswith("\n")


def test_generate_command_samples_from_trained_weights(finished_trainer):
    tokens = torch.tensor(list(b"def "))
    with torch.no_grad():
        expected = generate(
            finished_trainer.module, tokens, 30, temperature=0, context=finished_trainer.run.training.seq_len
        )
    assert 256 not in expected  # the end of the text
    text = command_output(
        "generate", finished_trainer.directory, "--prompt", "def ", "--tokens", 30, "--temperature", 0
    )
    assert text == byte_tokenizer().decode(expected.tolist()) + "\n"


def test_generate_yields_only_complete_utf8_characters():
    euro = list("€".encode())
    assert list(pieces(byte_tokenizer(), [65], [66, *euro, 67])) == ["B", "€", "C"]


def test_exported_model_logits_match_when_loaded_by_transformers(finished_trainer, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert "parameters in fp32" in command_output("export", finished_trainer.directory, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "out").encode("import json")])
    assert ids.tolist() == [list(b"import json")]
    with torch.no_grad():
        logits = theirs(ids).logits
        torch.testing.assert_close(logits, finished_trainer.module(ids)[0], rtol=0, atol=2e-5)
    assert float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])) < math.log(257)  # it has learned


def test_export_writes_config_json_and_rejects_non_empty_directory(run_directory, tmp_path):
    text = command_output("export", run_directory, "--to", "hf", tmp_path / "out", "--dtype", "bf16")
    assert "parameters in bf16" in text
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["eos_token_id"], config["torch_dtype"]) == ("qwen3", 256, "bfloat16")
    with pytest.raises(UserError, match="not empty"):
        command_output("export", run_directory, "--to", "hf", tmp_path / "out")
    with pytest.raises(UserError, match="not a known format"):
        command_output("export", run_directory, "--to", "gguf", tmp_path / "other")


def test_generate_and_export_reject_directory_without_checkpoint(tmp_path):
    for command in (["generate", tmp_path], ["export", tmp_path, tmp_path / "out"]):
        with pytest.raises(UserError) as caught:
            command_output(*command)
        assert (caught.value.field, caught.value.value) == ("run directory", str(tmp_path))
        assert caught.value.fix
