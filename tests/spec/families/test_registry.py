"""The tables of all families compared with the configuration classes of transformers."""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from typing import get_args

import pytest

from phalanx.spec.base import parse_table
from phalanx.spec.errors import UserError
from phalanx.spec.families.common_fields import FIXED_FIELDS, HARMLESS_FIELDS
from phalanx.spec.families.config_json import hf_config, model_table, require_known_fields, write_config
from phalanx.spec.families.family import Fixed, Read, SameAs
from phalanx.spec.families.registry import EXPORTED_FIRST, families
from phalanx.spec.model import BlockIndexerSpec, ModelSpec, MoESpec, QueryTemperatureSpec, RopeSpec
from phalanx.spec.parts.mixers import Mamba2, MixerSpec
from phalanx.spec.parts.mixers.latent_attention import IndexerSpec
from tests.helpers.altered_fields import altered_fields

SMALL = (
    {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts_per_tok": 1,
        "n_group": 2,
        "hidden_size_per_layer_input": 0,
        "topk_group": 1,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "mamba_n_heads": 8,
        "shared_expert_combination_strategy": "sum",
    },
    {"n_embd": 32, "n_head": 4},
)
"""Sizes of a small model in the words of Llama, and in those of GPT-2."""

MIXERS = get_args(get_args(MixerSpec)[0])
SUPPORTED = {
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "glm4_moe": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "kimi_linear": {"num_expert_group": 4},
    "falcon_h1": {"mamba_norm_before_gate": False},
    "mimo_v2_flash": {"num_attention_heads": 64, "head_dim": 192, "v_head_dim": 24},
    "dots1": {"num_experts_per_tok": 6, "n_routed_experts": 128, "n_shared_experts": 2},
}
"""Values in place of defaults that are refused or absent. GLM's heads have an odd half, MiMo's values are narrow."""


@pytest.fixture(params=families())
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def architectures():
    """Return the public names of transformers, which it computes again at each `dir`."""
    return set(dir(pytest.importorskip("transformers")))


@pytest.fixture
def theirs(kind):
    """Return the default configuration of a family in transformers."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoConfig.for_model(kind, **SUPPORTED.get(kind, {}))


def test_families_are_found_and_plain_ones_are_exported_first():
    names = list(families())
    assert {"llama", "gpt2", "mistral", "mixtral", "olmoe", "qwen3", "qwen3_moe"} <= set(names)
    assert names == [*EXPORTED_FIRST, *sorted(set(names) - {*EXPORTED_FIRST})]


def test_every_attribute_of_the_configuration_class_is_accounted_for(kind, theirs):
    attributes = {field.name for field in dataclasses.fields(theirs)} | theirs.to_dict().keys()
    for attribute in attributes - {"model_type"}:
        require_known_fields({"model_type": kind, attribute: {}})


def test_defaults_equal_those_of_transformers(kind, theirs, architectures):
    assert families()[kind].architecture in architectures
    ours = {"model_type": kind} | SUPPORTED.get(kind, {})
    assert drop_unset(model_table(ours)) == drop_unset(model_table(theirs.to_dict()))
    defaults = {field.name: field.default for field in dataclasses.fields(theirs)}
    defaults.setdefault("head_dim")  # not a field of Qwen3-MoE and OLMoE, but their attention reads it
    for name, field in families()[kind].fields.items():
        if isinstance(field, Read):
            known = next(other for other in (name, *field.other_names) if other in defaults)
            assert field.default == defaults[known], name
    for name, field in (FIXED_FIELDS | families()[kind].fields).items():
        if isinstance(field, Fixed):
            default = defaults.get(name, field.value)
            assert field.value == default or not (field.value or default), name


def drop_unset(table):
    return {dial: value for dial, value in table.items() if value is not None}


def test_export_import_export_is_the_identity(kind):
    spec = parse_table(ModelSpec, model_table({"model_type": kind} | SUPPORTED.get(kind, {})))
    config = write_config(families()[kind], spec)
    assert parse_table(ModelSpec, model_table(config)) == spec
    assert write_config(families()[kind], parse_table(ModelSpec, model_table(config))) == config
    assert parse_table(ModelSpec, model_table(hf_config(spec))) == spec


def test_altered_field_changes_one_dial_and_is_exported(kind):
    transformers = pytest.importorskip("transformers")
    fields = families()[kind].fields
    other_names = {name for field in fields.values() if isinstance(field, Read) for name in field.other_names}
    sizes = {
        name: size
        for name, size in SMALL[kind == "gpt2"].items()
        if not isinstance(fields.get(name), SameAs | Fixed) and name not in other_names
    }
    small = sizes | SUPPORTED.get(kind, {}) | {"model_type": kind}
    before = parse_table(ModelSpec, model_table(small))
    for name, value in altered_fields(kind, small).items():
        spec = parse_table(ModelSpec, model_table(small | {name: value}))
        dial = fields[name].dial
        assert attrgetter(dial)(spec) != attrgetter(dial)(before), name
        config = transformers.AutoConfig.for_model(**write_config(families()[kind], spec))
        written = config.to_dict()
        assert (written[name] if name in written else getattr(config, name)) == value


def test_dial_is_set_by_one_field_or_constant(kind):
    family = families()[kind]
    dials = [*family.constants, *(dial for field in family.fields.values() for dial in field.dials)]
    assert len(dials) == len(set(dials))
    for dial in dials:
        table, _, name = dial.rpartition(".")
        inner = ".".join(table.split(".")[2:]) if table.startswith("kinds.") else table
        tables = {"": (ModelSpec,), "rope": (RopeSpec,), "moe": (MoESpec,), "mixer": MIXERS}
        tables["mixer.indexer"] = (IndexerSpec,)
        tables |= {"indexer": (BlockIndexerSpec,), "side_mixer": (Mamba2,)}
        tables["query_temperature"] = (QueryTemperatureSpec,)
        assert any(name in table.model_fields for table in tables[inner])


def test_no_field_is_both_read_and_harmless(kind):
    read = {name for name, field in families()[kind].fields.items() if isinstance(field, Read | Fixed)}
    assert not read & HARMLESS_FIELDS
    assert not FIXED_FIELDS.keys() & HARMLESS_FIELDS


def test_parameter_has_one_place_in_a_checkpoint(kind):
    names = [name for _, rows in families()[kind].stored_rows for name in rows.names]
    assert len(names) == len(set(names))


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
    "lfm2": {"block_dim": 2048, "conv_dim_out": 2048, "theta": 1e6, "use_pos_enc": True, "full_attn_idxs": [2]},
    "minimax_m2": {
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_mtp": True,
        "num_mtp_modules": 3,
        "mtp_transformer_layers": 1,
        "rotary_dim": 64,
    },
    "deepseek_v3": {"topk_method": "noaux_tc", "ep_size": 1, "seq_aux": True, "aux_loss_alpha": 0.001},
    "deepseek_v32": {"topk_method": "noaux_tc", "ep_size": 1, "first_k_dense_replace": 3, "moe_layer_freq": 1},
    "glm_moe_dsa": {"indexer_rope_interleave": True, "rope_interleave": True, "index_topk_pattern": None},
    "kimi_k2": {"topk_method": "noaux_tc", "moe_layer_freq": 1, "num_nextn_predict_layers": 0},
    "gpt_oss": {"experts_per_token": 4, "initial_context_length": 4096, "quantization_config": {}},
    "phi3": {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "embd_pdrop": 0.0},
    "glm4_moe": {"num_nextn_predict_layers": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "gemma3_text": {"cache_implementation": "hybrid", "sliding_window_pattern": 6, "rope_local_base_freq": 1e4},
    "cohere2": {
        "layer_switch": 4,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "use_parallel_block": True,
        "use_qk_norm": False,
    },
    "gpt_neox": {"rotary_pct": 0.25, "rotary_emb_base": 10000, "hidden_dropout": 0.0, "use_cache": True},
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


def test_field_of_no_family_is_refused_by_name(kind):
    with pytest.raises(UserError, match=rf"config\.json logit_softcap = 30.* is not a known field of a {kind} model"):
        require_known_fields({"model_type": kind, "logit_softcap": 30.0})


EXPERT_NAMES = [{"num_experts": 16}, {"num_local_experts": 16}, {"num_experts": 16, "num_local_experts": 32}]


@pytest.mark.parametrize("kind", ["mixtral", "olmoe", "qwen3_moe"])
@pytest.mark.parametrize("fields", EXPERT_NAMES, ids=str)
def test_number_of_experts_has_two_names_as_in_transformers(kind, fields):
    transformers = pytest.importorskip("transformers")
    expected = transformers.AutoConfig.for_model(kind, **fields).num_experts
    assert model_table({"model_type": kind} | fields)["moe"]["num_experts"] == expected
