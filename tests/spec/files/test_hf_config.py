import json

import pytest

from phalanx.spec.base import parse_table
from phalanx.spec.errors import UserError
from phalanx.spec.files.hf_config import hf_config, model_table
from phalanx.spec.files.load import load_model, preset_names
from phalanx.spec.model import ModelSpec

BASE = {"vocab_size": 100, "hidden_size": 32, "num_layers": 3, "num_heads": 4, "ffn_hidden_size": 48, "max_seq_len": 64}
# Hugging Face's mixtures have no router z-loss; Mixtral's and OLMoE's dense width is that of their experts.
MOE = {"num_experts": 6, "top_k": 2, "expert_ffn_size": 48, "z_loss_coef": 0.0, "balance_loss_coef": 0.02}
SHAPES = {
    "llama": {**BASE, "num_kv_heads": 2, "rope": {"theta": 5e5}},
    "qwen3": {**BASE, "num_kv_heads": 2, "head_dim": 16, "qk_norm": "head", "tie_embeddings": True, "norm_eps": 1e-6},
    "mixtral": {**BASE, "num_kv_heads": 2, "moe": MOE},
    "olmoe": {**BASE, "qk_norm": "full", "moe": {**MOE, "normalize_top_k": False}},
    "qwen3_moe": {
        **BASE,
        "head_dim": 16,
        "qk_norm": "head",
        "moe": {**MOE, "expert_ffn_size": 24, "num_leading_dense_layers": 1},
    },
    "gpt2": {
        **BASE,
        "norm": "layernorm",
        "activation": "gelu_tanh",
        "position_embedding": "learned",
        "bias": True,
        "tie_embeddings": True,
    },
}
ROPES = [
    {"theta": 1e6},
    {"scaling": "linear", "factor": 4.0},
    {"scaling": "llama3", "factor": 8.0, "original_context": 32, "low_freq_factor": 1.5, "high_freq_factor": 3.0},
    {"scaling": "yarn", "factor": 4.0, "original_context": 16, "beta_fast": 16.0, "beta_slow": 2.0},
]


@pytest.mark.parametrize("kind", SHAPES)
def test_hf_config_round_trips_model_spec(kind):
    spec = parse_table(ModelSpec, SHAPES[kind])
    config = hf_config(spec)
    assert config["model_type"] == kind
    assert parse_table(ModelSpec, model_table(config)) == spec


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.get("scaling", "none"))
def test_hf_config_round_trips_rope_scaling(rope):
    spec = parse_table(ModelSpec, {**BASE, "rope": rope})
    assert parse_table(ModelSpec, model_table(hf_config(spec))).rope == spec.rope


def test_model_table_reads_rope_keys_of_older_transformers():
    config = hf_config(parse_table(ModelSpec, BASE))
    del config["rope_parameters"]
    config |= {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}
    rope = parse_table(ModelSpec, model_table(config)).rope
    assert (rope.theta, rope.scaling, rope.factor) == (1e4, "linear", 2.0)


@pytest.mark.parametrize("preset", preset_names("models"))
def test_hf_config_round_trips_model_presets(preset):
    spec = load_model(preset)
    back = parse_table(ModelSpec, model_table(json.loads(json.dumps(hf_config(spec)))))
    moe = None if spec.moe is None else spec.moe.replace(z_loss_coef=0.0).model_dump()
    # Experts alone have a width in Mixtral and OLMoE; scaling's own context matters to scaling alone.
    ffn = (
        spec.moe.expert_ffn_size
        if spec.moe and hf_config(spec)["model_type"] in ("mixtral", "olmoe")
        else spec.ffn_hidden_size
    )
    assert back == spec.replace(preset=None, moe=moe, ffn_hidden_size=ffn)


@pytest.mark.parametrize("kind", SHAPES)
def test_hf_config_is_unchanged_by_transformers_auto_config(kind):
    transformers = pytest.importorskip("transformers")
    config = hf_config(parse_table(ModelSpec, SHAPES[kind]))
    theirs = transformers.AutoConfig.for_model(**config)
    assert model_table(theirs.to_dict()) == model_table(config)


UNSUPPORTED_SETTINGS = [
    ("attention_bias", {"attention_bias": True}),
    ("partial_rotary_factor", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    ("rope_type", {"rope_parameters": {"rope_type": "longrope"}}),
    ("rope_type", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    ("attention_factor", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0}}),
    ("hidden_act", {"hidden_act": "relu"}),
    ("hidden_act", {"hidden_act": "gelu"}),
    ("model_type", {"model_type": "mamba"}),
    ("model_type", {"model_type": "bert"}),
    ("decoder_sparse_step", {"model_type": "qwen3_moe", "decoder_sparse_step": 2}),
    ("mlp_only_layers", {"model_type": "qwen3_moe", "mlp_only_layers": [1]}),
]


@pytest.mark.parametrize(("field", "change"), UNSUPPORTED_SETTINGS, ids=str)
def test_model_table_rejects_unsupported_hugging_face_settings(field, change):
    config = hf_config(parse_table(ModelSpec, {**BASE, "qk_norm": "head", "moe": MOE})) | {"model_type": "llama"}
    with pytest.raises(UserError, match=f"config.json {field}"):
        model_table(config | change)


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers"])
def test_model_table_names_missing_config_key(field):
    config = hf_config(parse_table(ModelSpec, BASE))
    del config[field]
    with pytest.raises(UserError, match=f"'{field}' is missing"):
        model_table(config)


GPT2 = {"norm": "layernorm", "position_embedding": "learned", "activation": "gelu", "bias": True}
UNEXPORTABLE_FIELDS = {
    "model.bias": {**GPT2, "bias": False},
    "model.norm": {"norm": "layernorm"},
    "model.qk_norm": {"qk_norm": "full"},
    "model.moe.router_score": {"moe": {**MOE, "router_score": "sigmoid"}},
    "model.moe.num_shared_experts": {"moe": {**MOE, "num_shared_experts": 1}},
    "model.moe.num_leading_dense_layers": {"moe": {**MOE, "num_leading_dense_layers": 1}},
    "model.moe.bias_update_rate": {"moe": {**MOE, "bias_update_rate": 0.1}},
    "model.moe.normalize_top_k": {"moe": {**MOE, "normalize_top_k": False}},
    "model.num_kv_heads": {**GPT2, "num_kv_heads": 2},
    "model.activation": {"activation": "gelu"},
}


@pytest.mark.parametrize("field", UNEXPORTABLE_FIELDS)
def test_hf_config_rejects_model_without_hugging_face_architecture(field):
    spec = parse_table(ModelSpec, {**BASE, **UNEXPORTABLE_FIELDS[field]})
    with pytest.raises(UserError, match="can be exported") as caught:
        hf_config(spec)
    assert caught.value.field == field
