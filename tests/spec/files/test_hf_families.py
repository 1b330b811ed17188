"""The data of `hf_families` compared with the configuration classes of transformers."""

from __future__ import annotations

import dataclasses

import pytest

from phalanx.spec.errors import UserError
from phalanx.spec.files.hf_families import FAMILY_DEFAULTS, FIXED_VALUES, HARMLESS_FIELDS, require_known_fields

OLDER_NAMES = {"rope_scaling", "rope_theta", "original_max_position_embeddings", "num_local_experts"}
"""Names that the classes of transformers 5 read without having fields of these names."""


@pytest.fixture(params=FAMILY_DEFAULTS)
def kind(request):
    return request.param


def test_family_defaults_equal_those_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    config_class = type(transformers.AutoConfig.for_model(kind))
    theirs = {field.name: field.default for field in dataclasses.fields(config_class)}
    theirs["num_experts"] = theirs.get("num_experts", theirs.get("num_local_experts"))
    theirs.setdefault("head_dim")  # not a field of Qwen3-MoE and OLMoE, but their attention reads it
    ours = FAMILY_DEFAULTS[kind]
    wrong = {field: value for field, value in ours.items() if field not in OLDER_NAMES and theirs[field] != value}
    assert not wrong
    if kind != "gpt2":
        rope = transformers.AutoConfig.for_model(kind).rope_parameters
        assert rope == {"rope_type": "default", "rope_theta": ours["rope_theta"]}


def test_every_field_that_transformers_writes_is_known(kind):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind).to_dict()
    require_known_fields(config)
    assert config.keys() <= FAMILY_DEFAULTS[kind].keys() | FIXED_VALUES.keys() | HARMLESS_FIELDS
    fixed = {field: config[field] for field in FIXED_VALUES.keys() & config.keys()}
    assert fixed == {field: FIXED_VALUES[field] for field in fixed}


def test_no_field_is_both_read_and_harmless():
    for defaults in FAMILY_DEFAULTS.values():
        assert not defaults.keys() & FIXED_VALUES.keys()
        assert not defaults.keys() & HARMLESS_FIELDS - {"max_window_layers"}


HUB_FIELDS = {
    "gpt2": {"n_ctx": 1024, "summary_type": "cls_index", "task_specific_params": {"text-generation": {}}},
    "gpt2 of before 2020": {
        "model_type": "gpt2",
        "n_special": 0,
        "predict_special_tokens": True,
        "output_past": True,
        "_num_labels": 1,
    },
    "llama": {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}, "pretraining_tp": 1},
    "qwen3": {"_attn_implementation_autoset": True, "max_window_layers": 28, "use_sliding_window": False},
    "qwen3_moe": {"max_window_layers": 48, "sliding_window": None, "attention_bias": False, "rope_scaling": None},
    "mixtral": {"router_jitter_noise": 0.0, "output_router_logits": False, "num_local_experts": 8},
    "olmoe": {"clip_qkv": None, "output_router_logits": False, "pad_token_id": 1},
}


@pytest.mark.parametrize("name", HUB_FIELDS)
def test_fields_of_published_models_are_known(name):
    require_known_fields({"model_type": name} | HUB_FIELDS[name])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}}, "rope_scaling.mrope_section"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map"),
    ],
    ids=str,
)
def test_unknown_field_is_rejected_by_name_unless_null(change, name):
    config = {"model_type": "llama"}
    require_known_fields(config | dict.fromkeys(change))
    for table in ("rope_parameters", "rope_scaling"):
        require_known_fields(config | {table: {"rope_type": "default"} | dict.fromkeys(change)})
    with pytest.raises(UserError, match=f"config.json {name}"):
        require_known_fields(config | change)
