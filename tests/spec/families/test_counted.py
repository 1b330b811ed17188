import pytest

from phalanx.cost.exact.parameters import count_parameters
from phalanx.spec.base import parse_table
from phalanx.spec.errors import UserError
from phalanx.spec.families.config_json import model_table
from phalanx.spec.families.counted import counted_model_table
from phalanx.spec.model import ModelSpec

PHI3_MINI = {
    "model_type": "phi3",
    "vocab_size": 32_064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 131_072,
    "hidden_act": "silu",
    "rope_scaling": {"type": "longrope", "long_factor": [1.0]},
    "sliding_window": 2047,
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "attention_bias": True,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False},
}


@pytest.mark.parametrize(("config", "parameters"), [(PHI3_MINI, 3.821e9), (GPT_OSS_20B, 20.91e9)])
def test_counted_family_has_the_published_number_of_parameters(config, parameters):
    spec = parse_table(ModelSpec, counted_model_table(config))
    assert count_parameters(spec).total == pytest.approx(parameters, rel=1e-3)
    assert spec.sliding_window == {"phi3": 2047, "gpt_oss": 128}[config["model_type"]]
    assert spec.full_attention_layers == (tuple(range(1, 24, 2)) if config["model_type"] == "gpt_oss" else ())
    with pytest.raises(UserError, match=r"model_type|longrope"):
        model_table(config)


def test_counted_family_requires_its_sizes_and_known_windows():
    with pytest.raises(UserError, match=r"config\.json hidden_size is missing"):
        counted_model_table(PHI3_MINI | {"hidden_size": None})
    with pytest.raises(UserError, match="use_sliding_window = True"):
        counted_model_table(PHI3_MINI | {"use_sliding_window": True})
