import json

import pytest

from phalanx.cost.exact.parameters import count_parameters
from phalanx.spec.base import parse_table
from phalanx.spec.errors import UserError
from phalanx.spec.families.config_json import hf_config, merge_hf_config, model_table, require_known_fields
from phalanx.spec.files.load import load_model_spec, preset_names
from phalanx.spec.layers import layer_specs
from phalanx.spec.model import ModelSpec
from tests.helpers.choices import choice_fields, with_unknown_value

BASE = {"vocab_size": 100, "hidden_size": 32, "num_layers": 3, "num_heads": 4, "ffn_hidden_size": 48, "max_seq_len": 64}
# Hugging Face's models with experts have no router z-loss. The dense width of Mixtral and OLMoE is that of experts.
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


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("mistral_large4", "index_topk", 2048),
        ("internvl", "vision_config", {"a": 1}),
    ],
)
def test_family_with_an_unknown_part_is_refused_by_its_type_and_the_part(model_type, field, value):
    with pytest.raises(
        UserError, match=rf"model_type = '{model_type}' is not supported: its {field} .*neither trains nor plans"
    ) as error:
        model_table({"model_type": model_type, field: value})
    assert "gpt_oss" in error.value.fix


def test_text_of_qwen2_5_vl_may_be_beside_images_and_is_a_plain_model():
    rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    text = {"hidden_size": 2048, "num_attention_heads": 16, "rope_scaling": rope, "tie_word_embeddings": True}
    images = {"vision_config": {"depth": 32}, "image_token_id": 5, "vision_start_token_id": 6}
    table = model_table({"model_type": "qwen2_5_vl", **text, **images})
    assert table == model_table({"model_type": "qwen2_5_vl", "text_config": text, **images})
    assert (table["rope"], table["num_kv_heads"]) == ({"theta": 1e6, "scaling": "none"}, 8)
    assert hf_config(parse_table(ModelSpec, table))["model_type"] == "qwen2"
    with pytest.raises(UserError, match="audio_token_id"):
        require_known_fields({"model_type": "qwen2_5_vl", **text, **images, "audio_token_id": 7})


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
    spec = load_model_spec(preset)
    reread = parse_table(ModelSpec, model_table(json.loads(json.dumps(hf_config(spec)))))
    moe = None if spec.moe is None else spec.moe.replace(z_loss_coef=0.0).model_dump()
    # In Mixtral and OLMoE only experts have a width. The original context length matters only with RoPE scaling.
    ffn = (
        spec.moe.expert_ffn_size
        if spec.moe and hf_config(spec)["model_type"] in ("mixtral", "olmoe")
        else spec.ffn_hidden_size
    )
    expected = spec.replace(preset=None, moe=moe, ffn_hidden_size=ffn)
    assert layer_specs(reread) == layer_specs(expected)
    assert reread == expected or spec.layers
    require_known_fields(hf_config(spec))


@pytest.mark.parametrize("preset", preset_names("models"))
def test_transformers_makes_a_preset_with_as_many_parameters(preset):
    transformers = pytest.importorskip("transformers")
    import torch

    # Its auto classes have the text model of Mistral 4 inside mistral3 only.
    transformers.AutoModelForCausalLM.register(
        transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True
    )
    spec = load_model_spec(preset)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**hf_config(spec)))
    assert sum(parameter.numel() for parameter in model.parameters()) == count_parameters(spec).total


def test_hf_config_writes_the_width_of_shared_experts_that_follows_from_the_others():
    spec = load_model_spec("qwen3.5-35b-a3b")
    moe = spec.moe.model_copy(update={"shared_ffn_size": None})
    assert hf_config(spec.model_copy(update={"moe": moe})) == hf_config(spec)
    assert hf_config(load_model_spec("deepseek-v3"))["n_shared_experts"] == 1


@pytest.mark.parametrize("kind", SHAPES)
def test_hf_config_is_unchanged_by_transformers_auto_config(kind):
    transformers = pytest.importorskip("transformers")
    config = hf_config(parse_table(ModelSpec, SHAPES[kind]))
    auto_config = transformers.AutoConfig.for_model(**config)
    assert model_table(auto_config.to_dict()) == model_table(config)


MIMO = {"model_type": "mimo_v2_flash", "rope_parameters": None, "rope_theta": None}
LAGUNA = {"model_type": "laguna", "rope_parameters": None, "mlp_only_layers": None}
UNSUPPORTED_SETTINGS = [
    ("is_causal", {"is_causal": False}),
    ("is_causal", {"is_causal": False, "model_type": "gpt2"}),
    ("clip_qkv", {"clip_qkv": 8.0}),
    ("scale_attn_by_inverse_layer_idx", {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}),
    ("layer_types", {"model_type": "qwen3", "layer_types": ["chunked_attention"]}),
    ("layer_types", {"model_type": "qwen3", "layer_types": ["sliding_attention"]}),
    ("attention_bias", {"model_type": "mistral", "attention_bias": True}),
    ("mlp_bias", {"mlp_bias": True}),
    ("use_sliding_window", {"model_type": "smollm3", "use_sliding_window": True}),
    (
        "attn_logit_softcapping",
        {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0, "rope_parameters": None},
    ),
    ("rope_parameters", {"model_type": "gemma3_text", "rope_parameters": {"rope_type": "default"}}),
    ("layer_types", {"model_type": "gemma3_text", "rope_parameters": None, "layer_types": ["full_attention"]}),
    ("layer_types", {"model_type": "smollm3", "layer_types": ["sliding_attention", "full_attention"]}),
    ("partial_rotary_factor", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    ("sliding_window", {"model_type": "cohere2", "sliding_window": None}),
    ("use_qk_norm", {"model_type": "cohere2", "use_qk_norm": True}),
    ("attention_bias", {"model_type": "gpt_neox", "hidden_act": "gelu", "attention_bias": False}),
    ("rope_type", {"rope_parameters": {"rope_type": "longrope"}}),
    (
        "rope_parameters.llama_4_scaling_beta",
        {"model_type": "ministral3", "rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
    ),
    (
        "rope_parameters.original_max_position_embeddings",
        {"model_type": "ministral3", "rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
    ),
    ("rope_type", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    ("hidden_act", {"hidden_act": "relu"}),
    ("hidden_act", {"hidden_act": "gelu"}),
    ("model_type", {"model_type": "mamba"}),
    ("model_type", {"model_type": "bert"}),
    ("decoder_sparse_step", {"model_type": "qwen3_moe", "decoder_sparse_step": 2}),
    ("mlp_only_layers", {"model_type": "qwen3_moe", "mlp_only_layers": [1]}),
    ("indexer_types", {"model_type": "glm_moe_dsa", "indexer_types": ["full", "shared"]}),
    ("index_topk_pattern", {"model_type": "glm_moe_dsa", "index_topk_pattern": "FS"}),
    ("index_topk_freq", {"model_type": "glm_moe_dsa", "index_topk_freq": 4}),
    ("rope_type", {"model_type": "muse_glimmer_text", "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}),
    ("hybrid_layer_pattern", MIMO | {"hybrid_layer_pattern": [1, 1]}),
    ("swa_num_key_value_heads", MIMO | {"swa_num_key_value_heads": 2}),
    ("swa_rope_theta", MIMO | {"swa_rope_theta": 5e5}),
    ("mlp_only_layers", LAGUNA | {"mlp_only_layers": [1]}),
    ("gating_types", LAGUNA | {"gating_types": ["per_element"]}),
    ("gating", LAGUNA | {"gating": "per-element"}),
    ("use_rope_layers", {"model_type": "step3p5", "use_rope_layers": [False]}),
    ("yarn_only_types", {"model_type": "step3p5", "rope_parameters": None, "yarn_only_types": ["sliding_attention"]}),
    (
        "attention_other_setting.num_attention_groups",
        {"model_type": "step3p5", "attention_other_setting": {"num_attention_groups": 3}},
    ),
    ("per_layer_config", {"model_type": "step3p5", "per_layer_config": {"0": {"num_attention_heads": 3}}}),
    ("rope_theta", {"model_type": "step3p5", "rope_parameters": None, "rope_theta": [1e4, 1e5]}),
]


@pytest.mark.parametrize(("field", "change"), UNSUPPORTED_SETTINGS, ids=str)
def test_model_table_rejects_unsupported_hugging_face_settings(field, change):
    config = hf_config(parse_table(ModelSpec, {**BASE, "qk_norm": "head", "moe": MOE})) | {"model_type": "llama"}
    with pytest.raises(UserError, match=f"config.json {field}"):
        model_table(config | change)


def test_model_table_reads_defaults_of_absent_fields():
    mixtral = parse_table(ModelSpec, model_table({"model_type": "mixtral"}))
    assert (mixtral.norm_eps, mixtral.rope.theta, mixtral.num_kv_heads, mixtral.head_dim) == (1e-5, 1e6, 8, 128)
    assert mixtral.moe is not None
    assert (mixtral.moe.num_experts, mixtral.moe.top_k, mixtral.moe.balance_loss_coef) == (8, 2, 0.001)
    assert parse_table(ModelSpec, model_table({"model_type": "olmoe"})).norm_eps == 1e-5
    assert parse_table(ModelSpec, model_table({"model_type": "mistral"})).sliding_window == 4096
    assert parse_table(ModelSpec, model_table({"model_type": "mistral", "sliding_window": None})).sliding_window is None


QWEN3_WINDOW = {"model_type": "qwen3", "use_sliding_window": True, "num_hidden_layers": 2, "sliding_window": 8}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("change", "window", "full_layers"),
    [
        ({"max_window_layers": 1}, 8, [0]),
        ({"max_window_layers": 2}, None, []),
        ({"max_window_layers": 0, "use_sliding_window": False}, None, []),
        ({"max_window_layers": 0, "layer_types": [FULL, FULL]}, None, []),
        ({"max_window_layers": 2, "layer_types": [FULL, SLIDING]}, 8, [0]),
        ({"max_window_layers": 2, "layer_types": [SLIDING, FULL]}, 8, [1]),
        ({"model_type": "qwen3_moe", "max_window_layers": 48}, 8, []),
        ({"model_type": "qwen3_moe", "use_sliding_window": False}, None, []),
    ],
    ids=str,
)
def test_model_table_reads_sliding_window_of_qwen3(change, window, full_layers):
    transformers = pytest.importorskip("transformers")
    config = QWEN3_WINDOW | change
    table = model_table(config)
    assert (table.get("sliding_window"), table.get("full_attention_layers", [])) == (window, full_layers)
    auto_config = transformers.AutoConfig.for_model(**config)
    layers = getattr(auto_config, "layer_types", [SLIDING])
    assert (auto_config.sliding_window if SLIDING in layers else None) == window


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "qwen3_moe"])
def test_hf_config_round_trips_sliding_window(kind):
    spec = parse_table(ModelSpec, {**SHAPES[kind], "sliding_window": 16})
    config = hf_config(spec)
    assert config["model_type"] == {"llama": "mistral"}.get(kind, kind)
    assert parse_table(ModelSpec, model_table(config)) == spec


def test_hf_config_round_trips_layers_without_window():
    changes = {"num_layers": 3, "sliding_window": 16, "full_attention_layers": [0, 2]}
    spec = parse_table(ModelSpec, {**SHAPES["qwen3"], **changes})
    config = hf_config(spec)
    assert config["layer_types"] == [FULL, SLIDING, FULL]
    assert parse_table(ModelSpec, model_table(config)) == spec


def test_merge_hf_config_changes_only_what_the_model_changes():
    source = {
        **hf_config(parse_table(ModelSpec, {**SHAPES["mixtral"], "sliding_window": 16})),
        "num_experts_per_tok": 2,
        "bos_token_id": 1,
        "eos_token_id": [2, 7],
        "router_jitter_noise": 0.1,
        "dtype": "bfloat16",
    }
    spec = parse_table(ModelSpec, model_table(source))
    assert merge_hf_config(spec, source) == source
    longer = spec.replace(max_seq_len=128, rope={"scaling": "linear", "factor": 2.0})
    merged = merge_hf_config(longer, source)
    assert parse_table(ModelSpec, model_table(merged)) == longer
    changed = {field for field in merged if merged[field] != source.get(field)}
    assert changed == {"max_position_embeddings", "rope_scaling", "rope_parameters"}


def test_merge_hf_config_of_upcycled_model_keeps_special_tokens():
    source = hf_config(parse_table(ModelSpec, BASE)) | {"eos_token_id": 7, "pretraining_tp": 1}
    mixture = parse_table(ModelSpec, {**BASE, "moe": MOE})
    assert merge_hf_config(mixture, source) == hf_config(mixture) | {"eos_token_id": 7}


GPT2 = {"norm": "layernorm", "position_embedding": "learned", "activation": "gelu", "bias": True}
HYBRID = {"layers": "conv full", "kinds": [{"name": "conv", "mixer": {"kind": "short_convolution"}}], "qk_norm": "head"}
UNEXPORTABLE_FIELDS = {
    "model.bias": {**GPT2, "bias": False},
    "model.norm": {"norm": "layernorm", "qk_norm": "head"},
    "model.qk_norm": {**GPT2, "qk_norm": "head"},
    "model.moe.choice_bias": {"moe": {**MOE, "router_score": "sigmoid"}},
    "model.moe.router_score": {"qk_norm": "head", "moe": {**MOE, "num_shared_experts": 1}},
    "model.moe.num_groups": {"moe": {**MOE, "num_groups": 2}},
    "model.moe.normalize_top_k": {"moe": {**MOE, "normalize_top_k": False}},
    "model.num_kv_heads": {**GPT2, "num_kv_heads": 2},
    "model.activation": {"activation": "gelu"},
    "model.sliding_window": {"sliding_window": 16, "qk_norm": "full", "moe": MOE},
    "model.attention_bias": {"sliding_window": 16, "full_attention_layers": [0]},
    "model.attention_sinks": {"attention_sinks": True},
    "model.mixer.kind": {"mixer": {"kind": "short_convolution"}},
    "model.layers": {**GPT2, **HYBRID, "qk_norm": "none"},
}


SCALES = [{"residual_scale": 0.5}, {"embedding_scale": 3.0}, {"logits_divisor": 4.0}]


@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_config_of_a_scaled_model_is_accepted_by_transformers(scale):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**hf_config(parse_table(ModelSpec, {**BASE, **scale})))
    assert config.attention_multiplier == 8**-0.5


def test_layers_that_config_json_cannot_say_are_refused():
    window = {"name": "window", "sliding_window": 16}
    spec = parse_table(ModelSpec, {**BASE, **HYBRID, "layers": "conv full window", "kinds": [*HYBRID["kinds"], window]})
    with pytest.raises(UserError, match="layers with sliding_window = 16, which no Hugging Face model"):
        hf_config(spec)


@pytest.mark.parametrize("field", UNEXPORTABLE_FIELDS)
def test_hf_config_rejects_model_without_hugging_face_architecture(field):
    spec = parse_table(ModelSpec, {**BASE, **UNEXPORTABLE_FIELDS[field]})
    with pytest.raises(UserError, match="fix: export a model with") as error_info:
        hf_config(spec)
    assert error_info.value.field == field


# The loss is not exported, and a custom network is rejected for any value. Kinds are compared layer by layer.
IGNORED_FIELDS = ("model.moe.balance_loss_scope", "model.implementation", "model.kinds")


@pytest.mark.parametrize(
    ("base", "field"),
    [
        *((BASE | {"moe": MOE}, field) for field in choice_fields(ModelSpec, "model") if field not in IGNORED_FIELDS),
        *((BASE | GPT2, f"model.{name}") for name in ("norm", "activation", "qk_norm")),
    ],
)
def test_hf_config_refuses_a_value_that_it_does_not_name(base, field):
    spec = with_unknown_value(parse_table(ModelSpec, base), field.removeprefix("model."))
    with pytest.raises(UserError, match="is not used by any supported Hugging Face architecture") as error_info:
        hf_config(spec)
    assert error_info.value.field.removesuffix(".kind") == field


class WiderModelSpec(ModelSpec):
    """A ModelSpec of a later version."""

    logit_softcap: float | None = None


def test_hf_config_refuses_a_field_that_no_family_knows():
    spec = parse_table(WiderModelSpec, BASE)
    assert hf_config(spec) == hf_config(parse_table(ModelSpec, BASE))
    with pytest.raises(UserError, match=r"fix: export a model with model\.logit_softcap = None") as error_info:
        hf_config(spec.replace(logit_softcap=30.0))
    assert error_info.value.field == "model.logit_softcap"
