import pytest
from hypothesis import given, settings

from phalanx.cost.exact.parameters import count_parameters
from phalanx.spec.files.load import load_model_spec, preset_names
from phalanx.spec.model import ModelSpec
from tests.helpers.model_specs import model_specs

PUBLISHED_TOTALS = {
    "deepseek-v3": 671_026_404_352,
    "deepseek-v3.2": 671_877_929_216,
    "glm-5": 743_911_199_232,
    "mistral-small-4": 118_972_826_624,
    "kimi-k2": 1_026_408_209_408,
    "kimi-linear-48b-a3b": 49_133_074_464,
    "llama4-scout": 107_769_861_120,
    "granite-4-h-small": 32_207_337_984,
    "gpt2-124m": 124_439_808,
    "gpt3-175b": 174_604_259_328,
    "lfm2-1.2b": 1_170_340_608,
    "command-r7b": 8_028_033_024,
    "gpt-neox-20b": 20_554_567_680,
    "glm-4.5": 352_797_814_784,
    "minimax-m2": 228_689_748_992,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "nemotron-3-nano-30b-a3b": 31_577_937_344,
    "ministral3-8b": 8_489_553_920,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen3.5-397b-a17b": 396_346_350_336,
    "gemma2-9b": 9_241_705_984,
    "gemma3-27b": 27_009_346_304,
    "gemma4-31b": 30_697_345_280,
    "gemma4-26b-a4b": 25_233_141_760,
    "gemma4-e2b": 4_628_569_344,
    "gemma4-e4b": 7_463_013_376,
    "olmo3-32b": 32_233_522_176,
    "smollm3-3b": 3_075_098_624,
    "phi-4": 14_659_507_200,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    "olmoe-1b-7b": 6_919_161_856,
    "spes-1b": 1_167_423_744,
    "spes-7b": 7_333_287_936,
    "spes-9b": 9_430_950_912,
}


@pytest.mark.parametrize("preset", preset_names("models"))
def test_count_parameters_matches_published_totals(preset):
    if preset != "tiny":
        assert count_parameters(load_model_spec(preset)).total == PUBLISHED_TOTALS[preset]


ACTIVE_PARAMETERS = {
    "deepseek-v3": 37_552_282_624,
    "deepseek-v3.2": 38_403_807_488,
    "glm-5": 41_784_709_632,
    "mistral-small-4": 6_632_588_288,
    "kimi-k2": 32_861_477_888,
    "kimi-linear-48b-a3b": 3_494_852_640,
    "llama4-scout": 17_172_894_720,
    "qwen3-235b-a22b": 22_190_763_520,
    "qwen3.5-35b-a3b": 3_454_988_928,
    "qwen3.5-397b-a17b": 17_349_040_896,
    "glm-4.5": 33_632_251_904,
    "minimax-m2": 11_030_537_216,
    "granite-4-h-small": 8_803_121_664,
    "gpt-oss-20b": 4_187_440_704,
    "gpt-oss-120b": 5_711_982_912,
    "nemotron-3-nano-30b-a3b": 3_580_073_408,
    "gemma4-26b-a4b": 3_822_530_560,
}
"""Parameters that a token uses, counted on transformers' models of these shapes."""


@pytest.mark.parametrize("preset", ACTIVE_PARAMETERS)
def test_active_parameters_equal_those_of_transformers(preset):
    assert count_parameters(load_model_spec(preset)).active == ACTIVE_PARAMETERS[preset]


@pytest.mark.parametrize(
    ("preset", "billions"),
    [
        ("mixtral-8x7b", 12.9),
        ("olmoe-1b-7b", 1.3),
        ("qwen3-30b-a3b", 3.35),
        ("spes-1b", 0.375),
        ("spes-7b", 1.70),
        ("spes-9b", 3.09),
    ],
)
def test_active_parameters_match_published_counts(preset, billions):
    assert count_parameters(load_model_spec(preset)).active / 1e9 == pytest.approx(billions, rel=0.015)


@pytest.mark.parametrize(
    ("preset", "experts", "shared"),
    [
        ("spes-1b", 905_969_664, 261_454_080),
        ("spes-7b", 6_442_450_944, 890_836_992),
        ("spes-9b", 8_455_716_864, 975_234_048),
    ],
)
def test_expert_and_shared_parameters_match_published_counts(preset, experts, shared):
    count = count_parameters(load_model_spec(preset))
    assert (count.experts, count.total - count.experts) == (experts, shared)


def expected_tensor_shapes(spec: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    """Return every tensor of the model by hand, as a state dict would list them."""
    D, q, kv = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    norm = [(D,), (D,)] if spec.norm == "layernorm" else [(D,)]
    tensors = [("embedding", (spec.vocab_size, D))]
    tensors += [("embedding", (spec.max_seq_len, D))] if spec.position_embedding == "learned" else []
    for layer in range(spec.num_layers):
        tensors += [("norms", shape) for shape in [*norm, *norm]]
        tensors += [("attention", shape) for shape in ((q, D), (kv, D), (kv, D), (D, q))]
        tensors += [("attention", (n,)) for n in (q, kv, kv, D) if spec.bias]
        sizes = {"none": (), "head": (spec.head_dim, spec.head_dim), "full": (q, kv)}[spec.qk_norm]
        tensors += [("norms", (n,)) for n in sizes]
        if spec.moe and layer >= spec.moe.num_leading_dense_layers:
            tensors += [("router", (spec.moe.num_experts, D))]
            expert = [(spec.moe.expert_ffn_size, D), (spec.moe.expert_ffn_size, D), (D, spec.moe.expert_ffn_size)]
            tensors += [("experts", shape) for shape in expert * spec.moe.num_experts]
            tensors += [("shared_experts", shape) for shape in expert * spec.moe.num_shared_experts]
        else:
            tensors += [("mlp", (spec.ffn_hidden_size, D)), ("mlp", (D, spec.ffn_hidden_size))]
            tensors += [("mlp", (spec.ffn_hidden_size, D))] if spec.activation == "swiglu" else []
            tensors += [("mlp", (n,)) for n in (spec.ffn_hidden_size, D) if spec.bias]
    tensors += [("norms", shape) for shape in norm]
    return tensors if spec.tie_embeddings else [*tensors, ("head", (spec.vocab_size, D))]


def num_elements(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) == 2 else 1)


@settings(deadline=None)
@given(model_specs())
def test_count_parameters_by_part_equals_sum_of_tensors(spec):
    count, tensors = count_parameters(spec), expected_tensor_shapes(spec)
    for part in ("embedding", "attention", "mlp", "experts", "shared_experts", "router", "norms", "head"):
        assert getattr(count, part) == sum(num_elements(shape) for name, shape in tensors if name == part), part
    blocks = [s for name, s in tensors if name not in ("embedding", "head", "norms")]
    assert count.block_matrices == sum(num_elements(shape) for shape in blocks if len(shape) == 2)
    unused = (spec.moe.num_experts - spec.moe.top_k) / spec.moe.num_experts if spec.moe else 0
    assert count.inactive_experts == round(count.experts * unused)
    assert count.matmul == count.block_matrices - count.inactive_experts + spec.vocab_size * spec.hidden_size


@settings(max_examples=30, deadline=None)
@given(model_specs())
def test_count_parameters_equals_transformer_numel(spec):
    torch = pytest.importorskip("torch")
    from phalanx.model.transformer import Transformer

    with torch.device("meta"):
        model = Transformer(spec)
    assert count_parameters(spec).total == sum(p.numel() for p in model.parameters())
