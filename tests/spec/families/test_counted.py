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


def test_counted_family_has_the_published_number_of_parameters():
    spec = parse_table(ModelSpec, counted_model_table(PHI3_MINI))
    assert count_parameters(spec).total == pytest.approx(3.821e9, rel=1e-3)
    assert spec.sliding_window == 2047
    with pytest.raises(UserError, match="longrope"):
        model_table(PHI3_MINI)


def test_counted_family_requires_its_sizes_and_known_windows():
    with pytest.raises(UserError, match=r"config\.json hidden_size is missing"):
        counted_model_table(PHI3_MINI | {"hidden_size": None})
    with pytest.raises(UserError, match="use_sliding_window = True"):
        counted_model_table(PHI3_MINI | {"use_sliding_window": True})
