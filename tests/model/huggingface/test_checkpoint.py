import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.data.tokenizer import byte_tokenizer, load_tokenizer, train_bpe
from phalanx.model.huggingface.checkpoint import open_hf_weights
from phalanx.model.huggingface.export import export_hf, shard_names
from phalanx.spec.errors import UserError
from phalanx.spec.families.config_json import hf_config
from phalanx.spec.model import ModelSpec
from tests.helpers.random_models import load_model
from tests.helpers.small_runs import BIASED_EXPERTS

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 48,
    "max_seq_len": 64,
}
EXPERTS = {"num_experts": 4, "top_k": 2, "expert_ffn_size": 24, "z_loss_coef": 0.0}
LLAMA3 = {"theta": 500_000.0, "scaling": "llama3", "factor": 8.0, "original_context": 16}
GPT2 = {"norm": "layernorm", "position_embedding": "learned", "bias": True, "num_kv_heads": 4}
MODELS = {
    "llama": {},
    "llama, wide heads": {"head_dim": 16},
    "llama, llama3 rope": {"rope": LLAMA3},
    "llama, yarn": {"rope": {"scaling": "yarn", "factor": 4.0, "original_context": 16}},
    "llama, linear": {"rope": {"scaling": "linear", "factor": 4.0}},
    "llama, tied": {"tie_embeddings": True},
    "qwen3": {"qk_norm": "head", "norm_eps": 1e-6},
    "mixtral": {"moe": EXPERTS},
    "olmoe": {"qk_norm": "full", "moe": {**EXPERTS, "normalize_top_k": False}},
    "qwen3_moe": {"qk_norm": "head", "moe": EXPERTS},
    "qwen3_moe, dense first": {"qk_norm": "head", "moe": {**EXPERTS, "num_leading_dense_layers": 1}},
    "gpt2": {**GPT2, "activation": "gelu_tanh", "tie_embeddings": True},
    "gpt2, untied, exact gelu": {**GPT2, "activation": "gelu"},
}
TOKENS = torch.randint(0, 97, (2, 64), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _disable_progress_bar():
    import transformers

    transformers.logging.disable_progress_bar()


def build_spec(kind):
    return ModelSpec.model_validate({**SHAPE, **MODELS[kind]})


def export_model(model, directory, **options):
    export_hf(model.spec, dict(model.named_parameters()), directory, **options)
    return directory


def load_transformers_logits(directory, **options):
    from transformers import AutoModelForCausalLM

    model, loading_info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, **options)
    assert not any(loading_info.values()), loading_info
    with torch.no_grad():
        return model, model.eval()(TOKENS).logits


@pytest.mark.parametrize("kind", MODELS)
def test_hf_export_and_import_match_transformers_logits(build_model, tmp_path, kind):
    ours = build_model(build_spec(kind), torch.float32)
    theirs, logits = load_transformers_logits(export_model(ours, tmp_path / "ours"))
    assert theirs.config.model_type == kind.partition(",")[0]
    theirs.save_pretrained(tmp_path / "theirs")
    imported = load_model(tmp_path / "theirs", torch.float32)
    with torch.no_grad():
        for model in (ours, imported):
            torch.testing.assert_close(model(TOKENS)[0], logits, rtol=0, atol=2e-5)
    assert_identical(ours, imported)
    assert_identical(ours, load_model(tmp_path / "ours", torch.float32))


def assert_identical(first, second):
    state, other = first.state_dict(), second.state_dict()
    assert state.keys() == other.keys()
    assert all(torch.equal(state[name], other[name]) for name in state)


@pytest.mark.parametrize("kind", MODELS)
def test_hf_import_of_sharded_transformers_checkpoint_matches_logits(tmp_path, kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = hf_config(build_spec(kind))
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    for parameter in theirs.parameters():  # norms and biases too, which it sets to 1 and 0
        parameter.data += 0.05 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        torch.testing.assert_close(load_model(tmp_path, torch.float32)(TOKENS)[0], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["gpt2", "qwen3_moe", "gpt_oss"])
def test_part_of_a_weight_is_that_of_the_model(build_model, tmp_path, kind):
    spec = ModelSpec.model_validate(BIASED_EXPERTS) if kind == "gpt_oss" else build_spec(kind)
    model = build_model(spec, torch.float32)
    weights = open_hf_weights(export_model(model, tmp_path / "x"), spec)
    for name, parameter in model.named_parameters():
        for number in range(4):
            part = tuple(
                slice(number * size // 4, max((number + 1) * size // 4, size // 2)) for size in parameter.shape
            )
            assert torch.equal(weights.part(name, parameter.shape, part), parameter[part])
        none = (slice(0, 0), *(slice(0, size) for size in parameter.shape[1:]))
        assert weights.part(name, parameter.shape, none).shape == parameter[none].shape


def test_hf_import_accepts_gpt2_hub_tensor_names(build_model, tmp_path):
    model = build_model(build_spec("gpt2"), torch.float32)
    export_model(model, tmp_path / "x")
    tensors = load_file(tmp_path / "x" / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file({**old, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}, tmp_path / "x" / "model.safetensors")
    assert_identical(model, load_model(tmp_path / "x", torch.float32))


def test_hf_export_writes_bf16_shards_with_index(build_model, tmp_path):
    model = build_model(build_spec("olmoe"), torch.float32)
    export_model(model, tmp_path / "x", shard_bytes=8_000, dtype="bf16")
    files = sorted(tmp_path.glob("x/*.safetensors"))
    index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
    assert {file.name for file in files} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == 2 * sum(parameter.numel() for parameter in model.parameters())
    _, logits = load_transformers_logits(tmp_path / "x", dtype=torch.float32)
    imported = load_model(tmp_path / "x", torch.float32)
    for exported_parameter, parameter_read in zip(model.parameters(), imported.parameters(), strict=True):
        assert torch.equal(exported_parameter.bfloat16().float(), parameter_read)
    with torch.no_grad():
        torch.testing.assert_close(imported(TOKENS)[0], logits, rtol=0, atol=2e-5)


def test_shard_names_keeps_order_within_size_limit():
    assert shard_names({"a": 3, "b": 4, "c": 9, "d": 1, "e": 1}, 8) == [["a", "b"], ["c"], ["d", "e"]]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_hf_exported_tokenizer_matches_transformers(build_model, tmp_path, kind):
    from transformers import AutoTokenizer

    text = "def f(x):\n\treturn 'Straße 🦀' + x  # 1234\n" + "".join(map(chr, range(256)))
    tokenizer = byte_tokenizer() if kind == "bytes" else train_bpe([text] * 9, 300)
    tokenizer.save(tmp_path / "tokenizer.json")
    model = build_model(ModelSpec.model_validate({**SHAPE, "vocab_size": tokenizer.vocab}), torch.float32)
    export_model(model, tmp_path / "x", tokenizer=tmp_path / "tokenizer.json", eos_id=tokenizer.end)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "x")
    ids = tokenizer.encode_batch([text])[0].tolist()
    assert theirs(text).input_ids == ids
    assert theirs.decode(ids) == text
    assert theirs.eos_token_id == tokenizer.end
    assert load_tokenizer(tmp_path / "x").encode_batch([text])[0].tolist() == ids
    _, logits = load_transformers_logits(tmp_path / "x")
    assert logits.shape == (2, 64, tokenizer.vocab)


def assert_user_error_contains(call, *words):
    with pytest.raises(UserError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_open_hf_weights_rejects_unreadable_checkpoints(build_model, tmp_path):
    spec = build_spec("llama")
    export_model(build_model(spec, torch.float32), tmp_path / "whole")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(hf_config(spec)))
    assert_user_error_contains(lambda: open_hf_weights(tmp_path, spec), "no model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    assert_user_error_contains(lambda: open_hf_weights(tmp_path, spec), "pickled")
    save_file({**tensors, "model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    weights = open_hf_weights(tmp_path, spec)
    assert_user_error_contains(lambda: weights("norm.weight", torch.Size([32])), "model.norm.weight", "[3]", "[32]")
    tensors.pop("lm_head.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    assert_user_error_contains(lambda: open_hf_weights(tmp_path, spec), "has no tensor lm_head.weight")
    gpt2 = build_spec("gpt2")
    assert_user_error_contains(lambda: open_hf_weights(tmp_path, gpt2), "positions.weight", "no counterpart")
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the kind")
    assert_user_error_contains(lambda: open_hf_weights(tmp_path, spec), "cannot be read")
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "../model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_user_error_contains(lambda: open_hf_weights(tmp_path, spec), "does not contain model-1.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**hf_config(spec), "quantization_config": {"bits": 4}}))
    assert_user_error_contains(lambda: open_hf_weights(tmp_path, spec), "quant_method")
    (tmp_path / "config.json").write_text("{")
    assert_user_error_contains(lambda: open_hf_weights(tmp_path, spec), "not valid JSON")
    assert_user_error_contains(lambda: open_hf_weights(tmp_path / "nowhere", spec), "does not exist")


def test_export_hf_leaves_no_partial_directory_on_error(build_model, tmp_path):
    model = build_model(build_spec("llama"), torch.float32)
    parameters = dict(model.named_parameters())
    (tmp_path / "x").mkdir()
    export_model(model, tmp_path / "x")
    assert_user_error_contains(lambda: export_model(model, tmp_path / "x"), "not empty")
    parameters.pop("norm.weight")
    assert_user_error_contains(lambda: export_hf(model.spec, parameters, tmp_path / "y"), "norm.weight", "missing")
    assert_user_error_contains(lambda: export_model(model, tmp_path / "y", dtype="fp8"), "fp32, bf16")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert_user_error_contains(
        lambda: export_model(model, tmp_path / "y", tokenizer=tmp_path / "tokenizer.json"), "tokenizer"
    )
    assert sorted(os.listdir(tmp_path)) == ["tokenizer.json", "x"]
    assert (tmp_path / "x" / "model.safetensors").stat().st_mode & 0o044 == 0o044
