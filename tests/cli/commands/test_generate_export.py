"""`phalanx generate` and `phalanx export` on a trained and saved run."""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file

from phalanx.api.trained_model import load_model
from phalanx.cli.commands.generate import pieces
from phalanx.data.tokenizer import byte_tokenizer, train_bpe
from phalanx.model.generation import generate
from phalanx.model.huggingface.export import export_hf
from phalanx.spec.errors import UserError
from phalanx.spec.families.config_json import hf_config
from phalanx.testing.fault_injection import NotAllowed, small_disk
from phalanx.testing.processes import run_python
from phalanx.train.create_run import create_run
from tests.helpers.cli_runner import command_output, command_stderr
from tests.helpers.small_runs import MOE, make_trainer, small_run, train_to_end

SHORT_TRAINING = {"training.precision": "fp32", "training.steps": 12}


@pytest.fixture(scope="module")
def finished_trainer(tmp_path_factory):
    """Return a trainer that has finished, and whose run directory exists."""
    run = small_run(Path(json.__file__).parent, tmp_path_factory.mktemp("trained"), SHORT_TRAINING)
    create_run(run, 1, resume=False)
    trainer = make_trainer(run)
    train_to_end(trainer)
    trainer.module.eval()
    return trainer


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
    assert 256 not in expected  # 256 is the end of a text
    text = command_output(
        "generate", finished_trainer.directory, "--prompt", "def ", "--tokens", 30, "--temperature", 0
    )
    assert text == byte_tokenizer().decode(expected.tolist()) + "\n"


def test_ranks_that_share_a_model_print_the_text_of_one_process(run_directory):
    words = ["generate", str(run_directory), "--prompt", "def ", "--tokens", "20", "--seed", "3"]
    command = [sys.executable, "-m", "phalanx", *words, "--nproc", "2", "--set", "layout.tp=2"]
    done = run_python(command, timeout=120, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == command_output(*words)
    with pytest.raises(UserError, match=r"layout\.tp = 3"):
        command_output(*words, "--nproc", 3, "--set", "layout.tp=3")
    with pytest.raises(UserError, match=r"--set = .* has no effect in one process"):
        command_output(*words, "--set", "layout.tp=2")


def test_generate_and_export_take_a_checkpoint_by_step_and_by_path(finished_trainer, tmp_path):
    """Both names are of the same weights, which differ from those of the last step."""
    run = finished_trainer.run.replace(
        output_dir=str(tmp_path), evaluation=finished_trainer.run.evaluation.replace(every=4), checkpoint={"every": 4}
    )
    create_run(run, 1, resume=False)
    train_to_end(make_trainer(run))
    directory = tmp_path / run.name
    sample = ("--prompt", "def ", "--tokens", 30)
    newest = command_output("generate", directory, *sample)
    first = command_output("generate", directory, *sample, "--step", 8)
    assert first == command_output("generate", directory / "checkpoints" / "step-00000008", *sample) != newest
    assert newest == command_output("generate", directory, *sample, "--step", "best")  # the loss falls in this run
    assert "parameters of step 8 in" in command_output("export", directory, tmp_path / "out", "--step", 8)
    model, _ = load_model(directory, 8)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(exported["model.embed_tokens.weight"], dict(model.named_parameters())["embedding.weight"])
    with pytest.raises(UserError, match=r"--step = 9 is not a checkpoint of .*\n  fix: use one of 8, 12$"):
        command_output("export", directory / "checkpoints" / "step-00000009", tmp_path / "other")


def test_generate_yields_only_complete_utf8_characters():
    euro = list("€".encode())
    assert list(pieces(byte_tokenizer(), [65], [66, *euro, 67])) == ["B", "€", "C"]


def test_exported_model_logits_match_when_loaded_by_transformers(finished_trainer, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert "parameters of step 12 in fp32" in command_output("export", finished_trainer.directory, tmp_path / "out")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "out").encode("import json")])
    assert ids.tolist() == [list(b"import json")]
    with torch.no_grad():
        logits = reloaded(ids).logits
        torch.testing.assert_close(logits, finished_trainer.module(ids)[0], rtol=0, atol=2e-5)
    assert float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])) < math.log(257)  # the model has learned


def test_export_writes_config_json_and_rejects_non_empty_directory(run_directory, tmp_path):
    text = command_output("export", run_directory, "--to", "hf", tmp_path / "out", "--dtype", "bf16")
    assert "parameters of step 12 in bf16" in text
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["eos_token_id"], config["torch_dtype"]) == ("qwen3", 256, "bfloat16")
    with pytest.raises(UserError, match="not empty"):
        command_output("export", run_directory, "--to", "hf", tmp_path / "out")
    with pytest.raises(UserError, match="not a known format"):
        command_output("export", run_directory, "--to", "gguf", tmp_path / "other")


CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def save_chat_model(directory):
    """Save a Mistral with a sliding window, and a tokenizer with special tokens for chat turns."""
    from transformers import GenerationConfig, MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

    bpe = train_bpe([Path(json.__file__).read_text()] * 9, 300).model
    bpe.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=CHAT_TEMPLATE, **special)
    tokenizer.save_pretrained(directory)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    lengths = {"max_position_embeddings": 128, "sliding_window": 32, "num_key_value_heads": 2}
    config = MistralConfig(vocab_size=302, eos_token_id=301, bos_token_id=None, **shape, **lengths)
    model = MistralForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.6, eos_token_id=[301, 0])
    model.save_pretrained(directory)
    (directory / "LICENSE").write_text("Apache-2.0")
    (directory / "README.md").write_text("a model card of other weights")


def test_export_hands_on_files_of_the_model_that_training_started_from(tmp_path):
    source, moved = tmp_path / "source", tmp_path / "moved"
    save_chat_model(source)
    shutil.copy(source / "tokenizer.json", tmp_path)
    changes = {"model": {"from_hf": str(source)}, "data.tokenizer": str(tmp_path / "tokenizer.json")}
    run = small_run(Path(json.__file__).parent, tmp_path, {**SHORT_TRAINING, "training.steps": 4, **changes})
    directory = create_run(run, 1, resume=False)
    train_to_end(make_trainer(run))
    source.rename(moved)
    create_run(run, 1, resume=True)  # resuming does not need the source, and keeps its files
    command_output("export", directory, tmp_path / "out")
    handed_on = {file.name for file in moved.iterdir()} - {"README.md", "model.safetensors"}
    assert {"chat_template.jinja", "generation_config.json", "LICENSE", "tokenizer_config.json"} < handed_on
    assert {file.name for file in (tmp_path / "out").iterdir()} == handed_on | {"model.safetensors"}
    assert {name for name in handed_on if (tmp_path / "out" / name).read_bytes() != (moved / name).read_bytes()} <= {
        "config.json"
    }
    config, exported = (json.loads((folder / "config.json").read_text()) for folder in (moved, tmp_path / "out"))
    assert exported == config
    assert (config["model_type"], config["sliding_window"], config["max_position_embeddings"]) == ("mistral", 32, 128)
    before, after = (load_file(folder / "model.safetensors") for folder in (moved, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])


def test_export_of_adapters_is_merged_or_for_peft_and_starts_another_run(tmp_path):
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    source = tmp_path / "source"
    save_chat_model(source)
    shutil.copy(source / "tokenizer.json", tmp_path)
    adapter = {"rank": 2, "alpha": 4.0}
    changes = {
        "model": {"from_hf": str(source)},
        "data.tokenizer": str(tmp_path / "tokenizer.json"),
        "adapter": adapter,
    }
    changes |= SHORT_TRAINING | {"training.steps": 4, "optimizer.learning_rate": 0.01}
    run = small_run(Path(json.__file__).parent, tmp_path, changes)
    directory = create_run(run, 1, resume=False)
    trainer = make_trainer(run)
    train_to_end(trainer)
    assert "adapter_config.json" in command_output("export", directory, tmp_path / "adapter", "--to", "peft")
    command_output("export", directory, tmp_path / "merged")
    ids = torch.tensor([list(b"import json")])
    base = transformers.AutoModelForCausalLM.from_pretrained(source)
    models = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged"),
        peft.PeftModel.from_pretrained(base, tmp_path / "adapter"),
    )
    with torch.no_grad():
        expected = trainer.module.eval()(ids)[0]
        for model in models:
            torch.testing.assert_close(model.eval()(ids).logits, expected, rtol=0, atol=2e-5)
    adapter["from_peft"] = str(tmp_path / "adapter")
    second = make_trainer(small_run(Path(json.__file__).parent, tmp_path / "second", changes))
    with torch.no_grad():
        torch.testing.assert_close(second.module.eval()(ids)[0], expected)


def test_export_for_peft_needs_adapters(run_directory, tmp_path):
    with pytest.raises(UserError, match=r"(?s)writes adapters only.*the run has no \[adapter\]"):
        command_output("export", run_directory, tmp_path / "out", "--to", "peft")


def test_export_has_the_trained_biases_of_routers(tmp_path):
    moe = {**MOE["moe"], "num_shared_experts": 1, "router_score": "sigmoid", "bias_update_rate": 0.01, "z_loss_coef": 0}
    model = {**MOE, "moe": moe, "qk_norm": "head", "rope": {"fraction": 0.5}}
    run = small_run(Path(json.__file__).parent, tmp_path, {**SHORT_TRAINING, "training.steps": 4, "model": model})
    directory = create_run(run, 1, resume=False)
    trainer = make_trainer(run)
    train_to_end(trainer)
    command_output("export", directory, tmp_path / "out", "--dtype", "bf16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "glm4_moe"
    exported = load_file(tmp_path / "out" / "model.safetensors")
    layer = run.model.num_layers - 1
    bias = trainer.strategy.module.get_buffer(f"blocks.{layer}.mlp.router.bias")
    assert torch.equal(exported[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"], bias)
    assert bias.abs().max() > 0


def test_export_with_another_tokenizer_replaces_that_of_the_source(tmp_path, finished_trainer):
    model, source = finished_trainer.module, tmp_path / "source"
    source.mkdir()
    config = hf_config(model.spec) | {"eos_token_id": 1, "use_cache": False}
    texts = {"config.json": json.dumps(config), "chat_template.jinja": "x", "tokenizer.json": "{}", "NOTICE": "y"}
    for name, text in texts.items():
        (source / name).write_text(text)
    file = finished_trainer.directory / "tokenizer.json"
    export_hf(model.spec, dict(model.named_parameters()), tmp_path / "out", file, 256, source=source)
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | {"NOTICE"}
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported == config | {"bos_token_id": 256, "eos_token_id": 256}


def save_source(directory, spec, special_tokens):
    """Save the files of a chat model of this shape, except its weights, where a run keeps those of its source."""
    from transformers import PreTrainedTokenizerFast

    bpe = train_bpe([Path(json.__file__).read_text()] * 9, 257).model
    table = json.loads(bpe.to_str())
    table["added_tokens"] = []
    vocabulary = sorted(set(table["model"]["vocab"]) - {"<|endoftext|>"})
    table["model"] |= {"vocab": {token: number for number, token in enumerate(vocabulary)}, "merges": []}
    bpe = tokenizers.Tokenizer.from_str(json.dumps(table))
    bpe.add_special_tokens(special_tokens)
    bpe.enable_truncation(99)
    special = {"eos_token": special_tokens[0], "chat_template": CHAT_TEMPLATE}
    PreTrainedTokenizerFast(tokenizer_object=bpe, **special).save_pretrained(directory)
    model = json.loads(bpe.to_str())["model"]
    texts = {
        "config.json": hf_config(spec) | {"eos_token_id": bpe.token_to_id(special_tokens[0])},
        "generation_config.json": {"temperature": 0.6},
        "special_tokens_map.json": {"eos_token": special_tokens[0]},
        "vocab.json": model["vocab"],
    }
    for name, table in texts.items():
        (directory / name).write_text(json.dumps(table))
    return bpe


@pytest.fixture
def run_from_hf(run_directory, tmp_path, finished_trainer):
    """Return a copy of the run as if it had started from a chat model, and the tokenizer of this model. Phalanx does
    not know any of its tokens as the end of a text."""
    shutil.copytree(run_directory, tmp_path / "run")
    model = save_source(tmp_path / "run" / "from_hf", finished_trainer.module.spec, ["<|turn|>"])
    return tmp_path / "run", model


def read_files(directory):
    return {path.name: path.read_text() for path in directory.iterdir() if path.suffix in (".json", ".jinja")}


def test_export_with_more_tokens_than_the_source_hands_on_its_files(run_from_hf, tmp_path):
    from transformers import AutoTokenizer

    run, model = run_from_hf
    model.no_truncation()
    model.add_special_tokens(["<|endoftext|>"])
    model.save(str(run / "tokenizer.json"))
    assert command_stderr("export", run, tmp_path / "out") == ""
    before, after = read_files(run / "from_hf"), read_files(tmp_path / "out")
    assert before.keys() == after.keys() > {"chat_template.jinja", "special_tokens_map.json", "vocab.json"}
    assert {name for name in before if before[name] != after[name]} <= {"tokenizer.json", "config.json"}
    assert json.loads(after["config.json"])["eos_token_id"] == model.token_to_id("<|turn|>")
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported.convert_tokens_to_ids(["<|turn|>", "<|endoftext|>"]) == [256, 257]
    assert (exported.eos_token, exported.chat_template) == ("<|turn|>", CHAT_TEMPLATE)


def test_export_with_longer_vocabulary_leaves_out_that_of_the_source(run_from_hf, tmp_path):
    run, model = run_from_hf
    table = json.loads(model.to_str())
    table["model"]["vocab"] |= {"<|turn|>": 256, "<|endoftext|>": 257}
    (run / "tokenizer.json").write_text(json.dumps(table | {"truncation": None}))
    assert command_stderr("export", run, tmp_path / "out").rstrip().endswith("are not exported: vocab.json")
    before, after = read_files(run / "from_hf"), read_files(tmp_path / "out")
    assert before.keys() - after.keys() == {"vocab.json"}
    assert before["tokenizer_config.json"] == after["tokenizer_config.json"]


def test_export_with_another_tokenizer_says_what_it_leaves_out(run_from_hf, tmp_path):
    run, _ = run_from_hf
    message = command_stderr("export", run, tmp_path / "out")
    for name in read_files(run / "from_hf").keys() - {"config.json", "tokenizer.json"}:
        assert name in message
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 256


def test_export_to_full_disk_says_so_and_leaves_no_file(run_directory, tmp_path):
    disk = tmp_path / "disk"
    try:
        with small_disk(disk, 96 * 2**10):
            with pytest.raises(UserError, match="is on a full disk") as error_info:
                command_output("export", run_directory, disk / "out")
            assert error_info.value.field == "directory"
            assert list(disk.iterdir()) == []
    except NotAllowed as not_allowed:
        pytest.skip(str(not_allowed))


def test_generate_and_export_reject_directory_without_checkpoint(tmp_path):
    for command in (["generate", tmp_path], ["export", tmp_path, tmp_path / "out"]):
        with pytest.raises(UserError) as error_info:
            command_output(*command)
        assert (error_info.value.field, error_info.value.value) == ("run directory", str(tmp_path))
        assert error_info.value.fix
