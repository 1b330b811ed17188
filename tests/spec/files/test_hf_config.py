import pytest

from phalanx.spec.base import parse_table
from phalanx.spec.errors import UserError
from phalanx.spec.files.hf_config import hf_config, model_table
from phalanx.spec.files.load import load_model
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


@pytest.mark.parametrize("preset", ["llama3-8b", "llama3-405b", "mixtral-8x7b", "olmoe-1b-7b", "gpt2-124m"])
def test_hf_config_round_trips_shapes_of_published_presets(preset):
    spec = load_model(preset)
    back = model_table(hf_config(spec))
    for field in ("vocab_size", "hidden_size", "num_layers", "num_heads", "ffn_hidden_size", "max_seq_len"):
        assert back[field] == getattr(spec, field)


@pytest.mark.parametrize("kind", SHAPES)
def test_hf_config_is_unchanged_by_transformers_auto_config(kind):
    transformers = pytest.importorskip("transformers")
    config = hf_config(parse_table(ModelSpec, SHAPES[kind]))
    theirs = transformers.AutoConfig.for_model(**config)
    assert model_table(theirs.to_dict()) == model_table(config)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "bert"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type"),
    ],
)
def test_model_table_rejects_unsupported_hugging_face_settings(change, field):
    with pytest.raises(UserError, match=f"config.json {field}"):
        model_table({**hf_config(parse_table(ModelSpec, BASE)), **change})


def test_model_table_names_missing_config_key():
    with pytest.raises(UserError, match="'hidden_size' is missing"):
        model_table({"model_type": "llama", "vocab_size": 10})


@pytest.mark.parametrize(
    "change", [{"norm": "layernorm"}, {"qk_norm": "full"}, {"moe": {**MOE, "num_shared_experts": 1}}]
)
def test_hf_config_rejects_model_without_hugging_face_architecture(change):
    with pytest.raises(UserError, match="can be exported"):
        hf_config(parse_table(ModelSpec, {**BASE, **change}))
