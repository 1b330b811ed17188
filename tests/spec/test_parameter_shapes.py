import pytest
from hypothesis import given, settings

from phalanx.spec.files.load import load_model_spec, preset_names
from phalanx.spec.model import ModelSpec
from phalanx.spec.parameter_shapes import parameter_shapes, strip_block_index
from tests.helpers.model_specs import model_specs

GPT2 = ModelSpec(
    vocab_size=11,
    hidden_size=6,
    num_layers=2,
    num_heads=3,
    ffn_hidden_size=5,
    max_seq_len=7,
    norm="layernorm",
    activation="gelu",
    position_embedding="learned",
    bias=True,
    qk_norm="full",
    tie_embeddings=True,
)


def transformer_shapes(spec: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    torch = pytest.importorskip("torch")
    from phalanx.model.transformer import Transformer

    with torch.device("meta"):
        return [(name, tuple(parameter.shape)) for name, parameter in Transformer(spec).named_parameters()]


@pytest.mark.parametrize("preset", preset_names("models"))
def test_parameter_shapes_of_presets_match_transformer(preset):
    spec = load_model_spec(preset)
    assert list(parameter_shapes(spec).items()) == transformer_shapes(spec)


@settings(max_examples=50, deadline=None)
@given(model_specs())
def test_parameter_shapes_of_random_models_match_transformer(spec):
    assert list(parameter_shapes(spec).items()) == transformer_shapes(spec)


def test_parameter_shapes_of_gpt2_match_explicit_list():
    shapes = parameter_shapes(GPT2.replace(num_layers=1))
    assert list(shapes) == [
        "embedding.weight",
        "positions.weight",
        "blocks.0.attention_norm.weight",
        "blocks.0.attention_norm.bias",
        *(f"blocks.0.attention.{w}.{kind}" for w in ("wq", "wk", "wv", "wo") for kind in ("weight", "bias")),
        "blocks.0.attention.q_norm.weight",
        "blocks.0.attention.k_norm.weight",
        "blocks.0.mlp_norm.weight",
        "blocks.0.mlp_norm.bias",
        *(f"blocks.0.mlp.{w}.{kind}" for w in ("up", "down") for kind in ("weight", "bias")),
        "norm.weight",
        "norm.bias",
    ]
    assert shapes["embedding.weight"] == (11, 6)
    assert shapes["blocks.0.mlp.down.weight"] == (6, 5)


def test_strip_block_index_removes_number_of_block_and_nothing_else():
    assert strip_block_index("blocks.13.mlp.experts.up") == "blocks.mlp.experts.up"
    outside = ["embedding.weight", "positions.weight", "norm.weight", "norm.bias"]
    names = list(map(strip_block_index, parameter_shapes(GPT2)))
    assert [name for name in names if not name.startswith("blocks.")] == outside
    blocks = [name for name in names if name.startswith("blocks.")]
    assert blocks[: len(blocks) // 2] == blocks[len(blocks) // 2 :], "both blocks have the same names"
    assert len({*blocks}) == len(blocks) // 2
