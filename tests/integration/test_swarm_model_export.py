"""`phalanx generate` and `phalanx export` of a swarm's model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from phalanx.data.tokenizer import byte_tokenizer
from phalanx.spec.errors import UserError
from phalanx.spec.run import RunSpec
from phalanx.swarm.coordinator.coordinator import Coordinator
from phalanx.swarm.serve import initial_pieces, swarm_directory
from phalanx.train.checkpoint.load_model import load_trained_model
from tests.helpers.cli_runner import command_output
from tests.helpers.local_swarm import tiny_swarm_run


def create_coordinator(run: RunSpec) -> Path:
    """Create the directory of a coordinator as it is at the start of a swarm."""
    directory = swarm_directory(run)
    Coordinator(run, directory, initial_pieces(run)).journal.close()
    return directory


@pytest.fixture
def coordinator_directory(tmp_path: Path) -> Path:
    return create_coordinator(tiny_swarm_run(tmp_path, {"name": "lead"}))


def test_load_trained_model_returns_weights_of_swarm_coordinator(coordinator_directory):
    trained = load_trained_model(coordinator_directory)
    model, tokenizer, step = trained.module, trained.tokenizer_file, trained.step
    assert step is None
    base = load_file(coordinator_directory / "model" / "base.safetensors")
    parameters = dict(model.named_parameters())
    assert set(parameters) == set(base)
    assert all(torch.equal(parameters[name], weight) for name, weight in base.items())
    assert tokenizer.read_text() == byte_tokenizer().to_json()


def test_generate_output_is_equal_for_swarm_coordinator_and_node(coordinator_directory, tmp_path):
    node = tmp_path / "node"
    node.mkdir()
    shutil.copy(coordinator_directory / "run.toml", node)
    shutil.copy(coordinator_directory / "model" / "base.safetensors", node)
    outputs = [
        command_output("generate", directory, "--prompt", "def ", "--tokens", 20)
        for directory in (coordinator_directory, node)
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("def ")


def test_export_writes_swarm_model_in_hugging_face_format(tmp_path):
    moe = {"num_experts": 4, "top_k": 2, "expert_ffn_size": 24}  # a mixture of experts that transformers supports
    lead = create_coordinator(tiny_swarm_run(tmp_path, {"name": "lead", "model.moe": moe}))
    assert "parameters in fp32" in command_output("export", lead, tmp_path / "out")
    base, out = load_file(lead / "model" / "base.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(out["model.embed_tokens.weight"], base["embedding.weight"])
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_generate_from_coordinator_requires_tokenizer_copied_from_node(tmp_path):
    lead = create_coordinator(
        tiny_swarm_run(tmp_path, {"name": "lead", "data.tokenizer": "bpe", "data.tokenizer_vocab": 257})
    )
    with pytest.raises(UserError, match=r"has no tokenizer\.json") as caught:
        command_output("generate", lead)
    assert caught.value.fix == f"copy it from a node: cp nodes/NAME/tokenizer.json {lead}"
    byte_tokenizer().save(lead / "tokenizer.json")
    assert command_output("generate", lead, "--prompt", "def ", "--tokens", 3).startswith("def ")


def test_load_trained_model_rejects_damaged_or_mismatched_swarm_weights(coordinator_directory):
    weights = coordinator_directory / "model" / "base.safetensors"
    intact = weights.read_bytes()
    weights.write_bytes(intact[:-40])
    with pytest.raises(UserError, match=r"does not contain the weights of the model in run\.toml"):
        load_trained_model(coordinator_directory)
    weights.write_bytes(intact)
    load_trained_model(coordinator_directory)
    (coordinator_directory / "run.toml").write_text(
        (coordinator_directory / "run.toml").read_text().replace("hidden_size = 32", "hidden_size = 64")
    )
    with pytest.raises(UserError, match=r"embedding.weight is \[257, 32\] in the file, but \[257, 64\] in the model"):
        load_trained_model(coordinator_directory)
