"""The layers of a model with one kind of layers, with the short forms of two, and with several kinds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table
from phalanx.spec.layers import distinct_layers, expert_layers, layer_specs
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.block import blocks
from phalanx.spec.parts.model import model_parameters

TABLE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 48,
    "max_seq_len": 64,
}
MOE = {"num_experts": 4, "top_k": 2, "expert_ffn_size": 24}
MAMBA = {"kind": "mamba2", "num_heads": 4, "head_dim": 8, "state_size": 4, "chunk_size": 8}
KINDS = {
    "layers": "window*2 full nope",
    "sliding_window": 8,
    "moe": MOE,
    "kinds": [
        {"name": "full", "sliding_window": False, "moe": False, "head_dim": 16},
        {"name": "nope", "position_embedding": "none", "attention_sinks": False},
    ],
}


def model(**changes: Any) -> ModelSpec:
    return run_from_table({"model": TABLE | changes}).model


def test_layers_without_kinds_are_one_object() -> None:
    layers = layer_specs(model(num_layers=3))
    assert len(layers) == 3
    assert len({id(layer) for layer in layers}) == 1


def test_short_forms_leave_out_windows_and_experts() -> None:
    spec = model(num_layers=4, sliding_window=8, full_attention_layers=[1], moe=MOE | {"num_leading_dense_layers": 2})
    layers = layer_specs(spec)
    assert [layer.sliding_window for layer in layers] == [8, None, 8, 8]
    assert [layer.moe is not None for layer in layers] == [False, False, True, True]
    assert expert_layers(spec) == (2, 3)


def test_kinds_replace_values_of_the_model_in_their_layers() -> None:
    spec = model(**KINDS)
    layers = layer_specs(spec)
    assert spec.num_layers == 4
    assert [layer.sliding_window for layer in layers] == [8, 8, None, 8]
    assert [layer.head_dim for layer in layers] == [8, 8, 16, 8]
    assert [layer.position_embedding for layer in layers] == ["rope", "rope", "rope", "none"]
    assert expert_layers(spec) == (0, 1, 3)
    assert len(distinct_layers(spec)) == 3


def test_leading_layers_of_any_kind_may_be_dense() -> None:
    spec = model(layers="window full*2", sliding_window=8, kinds=[], moe=MOE | {"num_leading_dense_layers": 2})
    assert [layer.moe is not None for layer in layer_specs(spec)] == [False, False, True]
    assert {layer.sliding_window for layer in layer_specs(spec)} == {8}


def test_last_layers_read_the_keys_of_the_last_earlier_layer_of_their_kind() -> None:
    full = {"name": "full", "sliding_window": False, "head_dim": 16}
    kinds = {"layers": "window*2 full nope", "sliding_window": 8, "kinds": [full]}
    spec = model(**kinds, num_layers=7, num_shared_kv_layers=3, shared_kv_ffn_size=72)
    assert spec.kv_sources == {4: 1, 5: 1, 6: 2}
    layers = layer_specs(spec)
    assert [layer.num_shared_kv_layers for layer in layers] == [0, 0, 0, 0, 1, 1, 1]
    assert [layer.ffn_hidden_size for layer in layers] == [48, 48, 48, 48, 72, 72, 72]
    assert [layer.head_dim for layer in layers[4:]] == [8, 8, 16]
    assert layers[4] is layers[5]


def test_short_form_of_windows_has_two_kinds_whose_keys_are_shared() -> None:
    spec = model(num_layers=5, sliding_window=8, full_attention_layers=[1, 4], num_shared_kv_layers=2)
    assert spec.kv_sources == {3: 2, 4: 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_shared_kv_layers": 3}, "num_shared_kv_layers = 3 leaves no earlier layer of the kind of layer 0"),
        ({"layers": "a b a c", "num_shared_kv_layers": 1}, "leaves no earlier layer of the kind of layer 3"),
        (
            {"layers": "a b", "kinds": [{"name": "b", "mixer": MAMBA}], "num_layers": 4, "num_shared_kv_layers": 1},
            "includes layer 3, which has no attention with keys and values of its own",
        ),
        ({"shared_kv_ffn_size": 72}, "shared_kv_ffn_size = 72 has no effect without layers that share"),
        ({"num_shared_kv_layers": 1, "shared_kv_ffn_size": 72, "moe": MOE}, "has no effect on layers with experts"),
        ({"num_shared_kv_layers": 1, "mtp": {}}, "num_shared_kv_layers = 1 is not supported with model.mtp"),
        ({"per_layer_input_size": 8, "mtp": {}}, "per_layer_input_size = 8 is not supported with model.mtp"),
        ({"per_layer_input_size": 8, "activation": "gelu"}, "per_layer_input_size = 8 requires a gated activation"),
    ],
)
def test_wrong_layers_that_read_others_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error_info:
        model(**{"num_layers": 3 if "layers" not in changes else len(changes["layers"].split()), **changes})
    assert "fix:" in str(error_info.value)


def test_pattern_repeats_up_to_the_number_of_layers() -> None:
    windows = [layer.sliding_window for layer in layer_specs(model(**KINDS, num_layers=7))]
    assert windows == [8, 8, None, 8, 8, 8, None]


def test_a_layer_of_one_branch_has_neither_fields_nor_parameters_of_the_other() -> None:
    kinds = [{"name": "mamba", "branches": "mixer", "mixer": MAMBA}, {"name": "experts", "branches": "mlp"}]
    spec = model(layers="mamba experts", kinds=[*kinds], moe=MOE, qk_norm="head")
    mamba, experts = layer_specs(spec)
    assert (mamba.moe, experts.mixer, experts.qk_norm, experts.position_embedding) == (None, None, "none", "none")
    assert not mamba.attends
    assert not experts.attends
    assert [branch.part.name for block in blocks(spec) for branch in block] == ["attention", "mlp"]
    names = {name.split(".")[2].removesuffix("_norm") for name in model_parameters(spec) if name.startswith("blocks.1")}
    assert names == {"mlp"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": "a b", "kinds": [{"name": "c"}]}, "model.kinds = 'c' is not in model.layers"),
        ({"num_layers": 2, "kinds": [{"name": "c"}]}, "model.kinds = 'c' has no effect without model.layers"),
        ({"layers": "a b", "kinds": [{"name": "a"}, {"name": "a"}]}, "is the name of two kinds"),
        ({"layers": "a b)"}, "model.layers = 'a b\\)' has a parenthesis"),
        ({"layers": "a", "kinds": [{"name": "a", "head_dim": 7}]}, r"model.kinds \(a\).head_dim = 7 must be even"),
        ({"layers": "a", "kinds": [{"name": "a", "num_kv_heads": 3}]}, r"model.kinds \(a\).num_kv_heads = 3 does not"),
        ({"layers": "a", "moe": MOE, "kinds": [{"name": "a", "moe": False}]}, "leaves no layer with experts"),
        ({"layers": "a", "kinds": [{"name": "a", "moe": False}]}, "has no effect without model.moe"),
        (
            {"layers": "a", "position_embedding": "learned", "kinds": [{"name": "a", "rope": {}}]},
            "has no effect with position_embedding = 'learned'",
        ),
        ({"layers": "a", "kinds": [{"name": "a", "heads": 3}]}, r"model.kinds\[0\].heads = 3 is not a known field"),
        ({"layers": "a", "kinds": [{"name": "a", "sliding_window": -1}]}, r"model.kinds\[0\].sliding_window"),
        *(
            ({"layers": "a b", "kinds": [{"name": "a", "branches": branches} | changes]}, message)
            for branches, changes, message in (
                (
                    "mixer",
                    {"ffn_hidden_size": 8},
                    "ffn_hidden_size = 8 has no effect on a layer with branches = 'mixer'",
                ),
                ("mlp", {"mixer": MAMBA}, "has no effect on a layer with branches = 'mlp'"),
                ("mlp", {"head_dim": 16}, "head_dim = 16 has no effect without attention"),
            )
        ),
        *(
            ({"layers": "a b", "kinds": [{"name": "a", "mixer": MAMBA | changes}]}, message)
            for changes, message in (
                ({"num_groups": 3}, "num_groups = 3 does not divide mixer.num_heads"),
                ({"chunk_size": 7}, "chunk_size = 7 does not divide the numbers of a state"),
                ({"min_step": 2.0, "max_step": 1.0}, r"max_step = 1\.0 is below mixer.min_step"),
            )
        ),
        *(
            ({"num_layers": 1} | changes, message)
            for changes, message in (
                ({"norm_after_eps": 1e-8}, "norm_after_eps = 1e-08 has no effect without norms of outputs"),
                ({"value_head_dim": 64}, "value_head_dim = 64 exceeds head_dim"),
                ({"silu_limit": 1.0, "activation": "gelu"}, "silu_limit = 1.0 has no effect with model.activation"),
                ({"shared_silu_limit": 1.0}, "shared_silu_limit = 1.0 has no effect without shared experts"),
                ({"activation": "xielu", "moe": MOE}, "activation = 'xielu' is not supported with experts"),
            )
        ),
        (
            {
                "layers": "a b",
                "moe": MOE | {"num_shared_experts": 1},
                "kinds": [{"name": "a", "moe": False, "shared_silu_limit": 1.0}],
            },
            r"model.kinds \(a\).shared_silu_limit = 1.0 has no effect without experts",
        ),
        ({"num_layers": 2, "branches": "mixer", "moe": MOE}, "branches = 'mixer' leaves no layer with experts"),
        (
            {"num_layers": 2, "moe": MOE | {"shared_gate": True, "num_shared_experts": 1, "latent_size": 4}},
            "latent_size",
        ),
        (
            {"layers": "a b", "sliding_window": 8, "full_attention_layers": [1]},
            "full_attention_layers .*cannot be combined with model.layers",
        ),
        (
            {
                "layers": "a b",
                "moe": MOE | {"num_leading_dense_layers": 1},
                "kinds": [{"name": "b", "moe": False}],
            },
            "layers = 'a b' leaves no layer with experts",
        ),
    ],
)
def test_wrong_kinds_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error_info:
        model(**changes)
    assert "fix:" in str(error_info.value)


def test_model_with_kinds_is_the_same_after_a_dump_with_all_fields() -> None:
    spec = model(**KINDS)
    assert layer_specs(ModelSpec.model_validate_json(spec.model_dump_json())) == layer_specs(spec)


def test_layers_replace_those_of_a_preset() -> None:
    kinds = [{"name": "window", "sliding_window": 8}]
    spec = run_from_table({"model": {"preset": "tiny", "layers": "window*5 full", "kinds": kinds}}).model
    assert [layer.sliding_window for layer in layer_specs(spec)] == [8, 8, 8, 8, 8, None]


def test_a_kind_without_experts_may_be_upcycled() -> None:
    spec = ModelSpec.model_validate_json(json.dumps(TABLE | KINDS | {"from_hf": "x", "upcycle_reinit_fraction": 0.5}))
    assert expert_layers(spec) == (0, 1, 3)
